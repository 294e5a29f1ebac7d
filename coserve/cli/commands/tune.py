"""`coserve tune`: a file becomes a model that answers, on a server that keeps serving meanwhile."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, Any

import typer

from coserve.cli.adapter_settings import adapter_settings
from coserve.cli.connection import DEFAULT_URL, ApiKey, Json, Url, base_model
from coserve.client.http import Client
from coserve.client.job_progress import OVER
from coserve.errors import CoserveError, JobError, ServerError
from coserve.tuning.objectives import method_names


def tune(
    file: Annotated[
        Path,
        typer.Argument(
            metavar="FILE",
            help='JSONL, an example a line: {"messages": […]} as chats, {"prompt", "completion"}, or {"text"}; or the '
            "same in CSV or Parquet.",
        ),
    ],
    model: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL",
            help="What to start from: the base model, or an adapter to train further. [the base]",
        ),
    ] = None,
    suffix: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="A name that the finished model carries, 1 to 64 characters."
        ),
    ] = None,
    validation: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Examples that are never learned, only measured."),
    ] = None,
    metric: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help=(
                "Of answers to the validation file, beside its loss: exact_match, json_valid or "
                "json_match."
            ),
        ),
    ] = None,
    keep_best: Annotated[
        bool,
        typer.Option(
            "--keep-best",
            help="Make the checkpoint with the best validation the model, not the last one.",
        ),
    ] = False,
    patience: Annotated[
        int | None,
        typer.Option(
            metavar="N", min=1, help="End early once N validations in a row have not been better."
        ),
    ] = None,
    min_delta: Annotated[
        float | None,
        typer.Option(
            metavar="X", min=0, help="With --patience: better by more than this counts. [0]"
        ),
    ] = None,
    epochs: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            help="Times that every example is used: more learns it better, then by heart.",
        ),
    ] = None,
    batch_size: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            help="Examples of an optimizer step: more is steadier, and takes fewer steps.",
        ),
    ] = None,
    learning_rate: Annotated[
        float | None,
        typer.Option(
            help=(
                "Size of a step. 1e-4 is usual for LoRA; too much and the loss jumps, too little "
                "and it stays."
            )
        ),
    ] = None,
    schedule: Annotated[
        str | None,
        typer.Option(
            metavar="KIND",
            help="How the learning rate changes: constant, linear or cosine (both down to 0).",
        ),
    ] = None,
    warmup_steps: Annotated[
        int | None,
        typer.Option(metavar="N", min=0, help="Steps over which the learning rate rises."),
    ] = None,
    adapter: Annotated[
        str | None,
        typer.Option(
            metavar="METHOD",
            help="The PEFT method: lora, ia3, vera, prompt_tuning, …; docs/methods.md. [lora]",
        ),
    ] = None,
    adapter_setting: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=VALUE",
            help="A setting of the method, its value as JSON or as text; may be repeated.",
        ),
    ] = None,
    r: Annotated[
        int | None,
        typer.Option(
            "--r",
            metavar="N",
            min=1,
            help="LoRA's rank: more can learn more, and costs memory and time.",
        ),
    ] = None,
    alpha: Annotated[
        float | None,
        typer.Option(metavar="X", help="LoRA's scale is alpha / r; usually 1 or 2 times r."),
    ] = None,
    targets: Annotated[
        str | None,
        typer.Option(
            metavar="NAMES", help="Layers with an adapter, such as q_proj,v_proj; or all-linear."
        ),
    ] = None,
    max_length: Annotated[
        int | None,
        typer.Option(metavar="N", min=2, help="Longer examples are cut to this many tokens."),
    ] = None,
    checkpoint_every: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            help="Optimizer steps between checkpoints, each of which can be asked.",
        ),
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(
            metavar="N", min=0, help="Of the order of examples and the adapter's first values."
        ),
    ] = None,
    method: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help=f"What is learned: {', '.join(method_names())} (docs/jobs.md).",
        ),
    ] = "supervised",
    beta: Annotated[
        float | None,
        typer.Option(
            metavar="X", help="Of dpo, orpo, simpo and kto: how much a preference weighs."
        ),
    ] = None,
    max_recompute: Annotated[
        float | None,
        typer.Option(
            metavar="SHARE",
            min=0,
            max=1,
            help=(
                "Extra FLOPs to spend, as a share of a step's, so that the job keeps fewer "
                "activations in memory."
            ),
        ),
    ] = None,
    live: Annotated[
        bool, typer.Option("--live", help="Serve every optimizer step at once, not only the end.")
    ] = False,
    follow: Annotated[
        bool, typer.Option(help="Watch it until it is over; Ctrl-C leaves it running.")
    ] = True,
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
    as_json: Json = False,
) -> None:
    """Upload FILE, start a fine-tuning job on it, and watch it learn.

    The job takes the time that requests leave over: a busy server trains slowly, an idle one at
    full speed, and the view shows what requests see meanwhile against their SLOs. What is not given
    is chosen by the server. The finished model answers at once: `coserve chat --adapter SUFFIX`.
    """
    extensions = {
        "adapter": {
            **adapter_settings(adapter_setting),
            **_given(r=r, alpha=alpha, target_modules=_targets(targets)),
        },
        "optimizer": _given(
            learning_rate=learning_rate, schedule=schedule, warmup_steps=warmup_steps
        ),
        **_given(
            max_sequence_length=max_length,
            checkpoint_every_steps=checkpoint_every,
            live=live or None,
            max_recompute=max_recompute,
            evaluation=None if metric is None else {"metric": metric},
            keep_best=keep_best or None,
            early_stopping=_given(patience=patience, min_delta=min_delta) or None,
        ),
    }
    if extensions["adapter"] or adapter:
        extensions["adapter"] = {"type": adapter or "lora", **extensions["adapter"]}
    with Client(url, api_key) as client:
        body = {
            "model": model or base_model(client),
            **_given(suffix=suffix, seed=seed),
            **job_method(method, epochs=epochs, batch_size=batch_size, beta=beta),
            "coserve": {name: value for name, value in extensions.items() if value != {}},
        }
        with _uploads(client) as upload:
            body["training_file"] = upload(file)
            if validation is not None:
                body["validation_file"] = upload(validation)
            job = client.post("/v1/fine_tuning/jobs", body)
        if follow:
            watch(client, job, as_json=as_json)
        else:
            print(
                json.dumps({"job": job["id"], "status": job["status"]})
                if as_json
                else _afterwards(job["id"])
            )


@contextmanager
def _uploads(client: Client) -> Iterator[Callable[[Path], str]]:
    """Give the server files for a job. If it refuses the job they are deleted again: nobody else
    knows of them, and they count among the tenant's. Where no answer came, the job may be there and
    keeps them.
    """
    ids: list[str] = []

    def upload(path: Path) -> str:
        ids.append(client.upload(path)["id"])
        return ids[-1]

    try:
        yield upload
    except CoserveError as error:
        if not isinstance(error, ServerError) or 400 <= (error.status or 0) < 500:
            for id in ids:
                with suppress(ServerError):
                    client.delete(f"/v1/files/{id}")
        raise


def watch(client: Client, job: dict[str, Any], *, as_json: bool) -> None:
    """Follow a job to its end, and say how it ended; JobError if it failed."""
    from coserve.cli.follow import ctrl_c, follow
    from coserve.cli.tables import console

    screen = console()
    ended = job
    with ctrl_c() as stop, suppress(KeyboardInterrupt):
        screen.print(f"job {job['id']} on {job['model']}", soft_wrap=True)
        progress = follow(client, job, screen, stop)
        ended = progress.job
    if ended["status"] not in OVER:
        # A console of its own: what an interrupt left in the other's buffer would hold this back.
        console().print(
            f"\nThe job keeps running on the server.\n{_afterwards(job['id'])}", soft_wrap=True
        )
        if as_json:
            print(json.dumps({"job": job["id"], "status": "left running"}))
        return
    if ended["status"] == "failed":
        if as_json:
            print(json.dumps(progress.summary()), flush=True)
        raise JobError(
            f"job {ended['id']} failed: "
            f"{(ended.get('error') or {}).get('message') or 'no reason was given'}"
        )
    if ended["status"] == "succeeded":
        screen.print(
            f"Done. Ask it: coserve chat --adapter {ended['fine_tuned_model']}", soft_wrap=True
        )
    else:
        words = (
            f"The job was {ended['status']}; coserve jobs show {ended['id']} lists its checkpoints."
        )
        screen.print(words, soft_wrap=True)
    if as_json:
        print(json.dumps(progress.summary()))


def job_method(
    method: str = "supervised",
    *,
    epochs: int | None,
    batch_size: int | None,
    beta: float | None = None,
) -> dict[str, Any]:
    """The part of a job's body where OpenAI's API has the hyperparameters."""
    hyperparameters = _given(n_epochs=epochs, batch_size=batch_size, beta=beta)
    return {"method": {"type": method, method: {"hyperparameters": hyperparameters}}}


def _afterwards(job_id: str) -> str:
    return (
        f"watch it    coserve jobs follow {job_id}\n"
        f"let it rest coserve jobs pause {job_id}\n"
        f"end it      coserve jobs cancel {job_id}"
    )


def _targets(text: str | None) -> str | list[str] | None:
    if text is None or text == "all-linear":
        return text
    return [name.strip() for name in text.split(",") if name.strip()]


def _given(**values: Any) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}
