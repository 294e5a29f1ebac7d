"""`coserve jobs`: lists and controls a server's fine-tuning jobs."""

import json
import re
import time
from typing import Annotated, Any

import typer

from coserve.cli.at_rest import Database, Home, store_at_rest
from coserve.cli.connection import DEFAULT_URL, ApiKey, Json, Url
from coserve.client.http import Client
from coserve.errors import JobError

JobId = Annotated[
    str, typer.Argument(metavar="ID", help="Job such as ftjob-…, or last for the newest.")
]

_ID = re.compile(r"[\w-]+", re.ASCII)
_FILE = re.compile(r"^\w+_file file-\w+: ")
_LONGEST_ERROR = 40  # characters of a list's line

app = typer.Typer(
    name="jobs",
    help="List a server's fine-tuning jobs, or show, follow, pause, resume or cancel one.",
    rich_markup_mode="markdown",
)


@app.callback(invoke_without_command=True)
def jobs(
    context: typer.Context,
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
    as_json: Json = False,
    limit: Annotated[
        int, typer.Option(min=1, max=100, help="Maximum number of jobs to list, newest first.")
    ] = 20,
) -> None:
    """List a server's fine-tuning jobs, or show, follow, pause, resume or cancel one."""
    if context.invoked_subcommand is not None:
        _refuse_given(context, context.invoked_subcommand)
        return
    with Client(url, api_key) as client:
        records = client.get("/v1/fine_tuning/jobs", limit=limit)["data"]
        joined = client.get("/v1/status")["jobs"]["joined"]
    if as_json:
        print(json.dumps({"jobs": records, "joined": joined}))
        return
    from coserve.cli.commands.models import moment
    from coserve.cli.tables import console, table

    listing = table("=job", "status", ">=steps", ">=loss", ">=left", "result", "=since")
    for job in records:
        # `show` has all of it, with the file's name.
        error = _FILE.sub("", (job.get("error") or {}).get("message") or "")
        if len(error) > _LONGEST_ERROR:
            error = f"{error[: _LONGEST_ERROR - 1]}…"
        result = job.get("fine_tuned_model") or error or f"on {job['model']}"
        listing.add_row(
            job["id"], job["status"], *_progress(job), result, moment(job["created_at"])
        )
    console().print(listing if records else "No jobs yet; `coserve tune FILE` starts one.")
    for group in joined:
        console().print(f"{', '.join(group)} run their backward passes as one batch.")


def _refuse_given(context: typer.Context, command: str) -> None:
    """Refuse options of the list that are given before a subcommand, which would not read them and
    might use another server.
    """
    for option in context.command.params:
        source = context.get_parameter_source(str(option.name))
        if source is not None and source.name == "COMMANDLINE":
            words = f"options of {command} follow it: coserve jobs {command} ID …"
            raise typer.BadParameter(words, param_hint=option.opts[0])


def _progress(job: dict[str, Any]) -> tuple[str, str, str]:
    """Return the steps, the loss and the time left, as far as they are known."""
    from coserve.cli.drawing import duration

    known = job.get("coserve") or {}
    total, loss, finish = (
        known.get("total_steps"),
        known.get("train_loss"),
        job.get("estimated_finish"),
    )
    return (
        f"{known.get('step') or 0}/{total}" if total else "",
        "" if loss is None else f"{loss:.3f}",
        "" if finish is None else duration(max(0.0, finish - time.time())),
    )


@app.command()
def show(job: JobId, url: Url = DEFAULT_URL, api_key: ApiKey = None, as_json: Json = False) -> None:
    """Show all that the server knows of a job, and its checkpoints."""
    with Client(url, api_key) as client:
        record = _find(client, job)
        checkpoints = list(client.each(f"/v1/fine_tuning/jobs/{record['id']}/checkpoints"))
    if as_json:
        print(json.dumps({**record, "checkpoints": checkpoints}))
        return
    from coserve.cli.commands.models import moment
    from coserve.cli.tables import console, table

    listing = table("field", "value")
    for name, value in record.items():
        if value not in (None, [], {}):
            is_moment = name.endswith("_at") or name == "estimated_finish"
            words = (
                moment(value)
                if is_moment
                else value
                if isinstance(value, str)
                else json.dumps(value)
            )
            listing.add_row(name, words)
    for checkpoint in checkpoints:
        listing.add_row(
            f"step {checkpoint['step_number']}", checkpoint["fine_tuned_model_checkpoint"]
        )
    console().print(listing)


@app.command()
def events(
    job: JobId,
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
    as_json: Json = False,
) -> None:
    """List the events of a job, oldest first."""
    from coserve.cli.follow import event_line
    from coserve.cli.tables import console
    from coserve.client.job_progress import events_after

    with Client(url, api_key) as client:
        records = events_after(client, _find(client, job)["id"], None)
    if as_json:
        print(json.dumps({"events": records}))
        return
    for event in records:
        console().print(event_line(event), soft_wrap=True)


@app.command()
def follow(
    job: JobId, url: Url = DEFAULT_URL, api_key: ApiKey = None, as_json: Json = False
) -> None:
    """Watch a job until it ends; Ctrl-C leaves it running.

    Shows its steps and loss, and the latencies of requests meanwhile.
    """
    from coserve.cli.commands.tune import watch

    with Client(url, api_key) as client:
        watch(client, _find(client, job), as_json=as_json)


@app.command()
def pause(
    job: JobId, url: Url = DEFAULT_URL, api_key: ApiKey = None, as_json: Json = False
) -> None:
    """Pause a job after a checkpoint; `coserve jobs resume` resumes it."""
    _do("pause", job, url, api_key, as_json)


@app.command()
def resume(
    job: JobId, url: Url = DEFAULT_URL, api_key: ApiKey = None, as_json: Json = False
) -> None:
    """Resume a paused job exactly where it stopped."""
    _do("resume", job, url, api_key, as_json)


@app.command()
def cancel(
    job: JobId,
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
    as_json: Json = False,
    offline: Annotated[
        bool,
        typer.Option(
            "--offline",
            help="Cancel in the home's records while no server uses it, before one starts again.",
        ),
    ] = False,
    home: Home = None,
    database: Database = None,
) -> None:
    """Cancel a job; its checkpoints stay, and can be served."""
    if not offline:
        _do("cancel", job, url, api_key, as_json)
        return
    from coserve.jobs.maintenance.offline import cancel_job

    with store_at_rest(home, database) as (directory, store):
        record = cancel_job(store, directory, None if job == "last" else job)
    print(
        json.dumps({"id": record.id, "status": record.status})
        if as_json
        else f"{record.id}: {record.status}"
    )


def _do(verb: str, job: str, url: str, api_key: str | None, as_json: bool) -> None:
    with Client(url, api_key) as client:
        record = client.post(f"/v1/fine_tuning/jobs/{_find(client, job)['id']}/{verb}")
    print(json.dumps(record) if as_json else f"{record['id']}: {record['status']}")


def _find(client: Client, job: str) -> dict[str, Any]:
    if not _ID.fullmatch(job):
        raise JobError(f"{job!r} is not a job: use an id such as ftjob-…, or last")
    if job != "last":
        record: dict[str, Any] = client.get(f"/v1/fine_tuning/jobs/{job}")
        return record
    newest: list[dict[str, Any]] = client.get("/v1/fine_tuning/jobs", limit=1)["data"]
    if not newest:
        raise JobError("the server has no jobs yet; `coserve tune FILE` starts one")
    return newest[0]
