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
            help=(
                'Examples: JSONL with {"messages": […]} (a chat), {"prompt", "completion"} or '
                '{"text"} per line; or the same as CSV or Parquet.'
            ),
        ),
    ],
    model: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL",
            help=(
                "Model to start from: the base model, or an adapter to train further. [the base "
                "model]"
            ),
        ),
    ] = None,
    suffix: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="Name that the finished model carries, 1 to 64 characters."
        ),
    ] = None,
    validation: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="File of validation examples."),
    ] = None,
    metric: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help=(
                "Metric of answers to the validation examples, besides the loss: exact_match, "
                "json_valid or json_match."
            ),
        ),
    ] = None,
    keep_best: Annotated[
        bool,
        typer.Option(
            "--keep-best",
            help=(
                "Keep the checkpoint with the best validation result as the model, not the last "
                "one."
            ),
        ),
    ] = False,
    patience: Annotated[
        int | None,
        typer.Option(
            metavar="N", min=1, help="Stop early after N validations in a row without improvement."
        ),
    ] = None,
    min_delta: Annotated[
        float | None,
        typer.Option(
            metavar="X", min=0, help="Minimum improvement that counts for --patience. [0]"
        ),
    ] = None,
    epochs: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            help="Number of passes over the examples: more of them fit better, and may overfit.",
        ),
    ] = None,
    batch_size: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            help="Examples per optimizer step: a larger batch is steadier, and takes fewer steps.",
        ),
    ] = None,
    learning_rate: Annotated[
        float | None,
        typer.Option(
            help=(
                "Learning rate; 1e-4 is usual for LoRA. Too high, and the loss jumps; too low, "
                "and it stays."
            )
        ),
    ] = None,
    schedule: Annotated[
        str | None,
        typer.Option(
            metavar="KIND",
            help="Schedule of the learning rate: constant, linear or cosine (both decay to 0).",
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
            help="PEFT method: lora, ia3, vera, prompt_tuning, … (docs/methods.md). [lora]",
        ),
    ] = None,
    adapter_setting: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=VALUE",
            help="Setting of the method, its value as JSON or text. Repeatable.",
        ),
    ] = None,
    r: Annotated[
        int | None,
        typer.Option(
            "--r",
            metavar="N",
            min=1,
            help="LoRA rank: a higher one can learn more, and costs memory and time.",
        ),
    ] = None,
    alpha: Annotated[
        float | None,
        typer.Option(
            metavar="X", help="LoRA alpha; the update is scaled by alpha / r. Usual: r or 2 r."
        ),
    ] = None,
    targets: Annotated[
        str | None,
        typer.Option(metavar="NAMES", help="Target modules, such as q_proj,v_proj, or all-linear."),
    ] = None,
    max_length: Annotated[
        int | None,
        typer.Option(metavar="N", min=2, help="Maximum tokens per example; longer ones are cut."),
    ] = None,
    checkpoint_every: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            help="Optimizer steps between checkpoints; each can be served.",
        ),
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=0,
            help="Seed of the order of examples and of the adapter's first values.",
        ),
    ] = None,
    method: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help=f"Training method: {', '.join(method_names())} (docs/jobs.md).",
        ),
    ] = "supervised",
    beta: Annotated[
        float | None,
        typer.Option(metavar="X", help="Weight of preferences, for dpo, orpo, simpo and kto."),
    ] = None,
    max_recompute: Annotated[
        float | None,
        typer.Option(
            metavar="SHARE",
            min=0,
            max=1,
            help=(
                "Extra FLOPs, as a share of a step's, to spend so that the job keeps fewer "
                "activations in memory."
            ),
        ),
    ] = None,
    live: Annotated[
        bool,
        typer.Option(
            "--live", help="Serve the adapter after every optimizer step, not only at the end."
        ),
    ] = False,
    follow: Annotated[
        bool, typer.Option(help="Watch the job until it ends; Ctrl-C leaves it running.")
    ] = True,
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
    as_json: Json = False,
) -> None:
    """Upload FILE, start a fine-tuning job on it, and watch its progress.

    The job uses the time that requests leave over: it is slow on a busy server and runs at full
    speed on an idle one. The view also shows the latencies of requests against their SLOs. The
    server chooses settings that are not given. The finished model is served at once: `coserve chat
    --adapter SUFFIX`.
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
    """Yield a function that uploads files for a job, and delete them if the server refuses the job.

    Nobody else knows of these files, and they count among the tenant's. If no answer arrives, the
    job may exist and keeps them.
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
    """Follow a job until it ends, and print how it ended.

    Raises:
        JobError: The job failed.
    """
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
            f"{(ended.get('error') or {}).get('message') or 'the server gave no reason'}"
        )
    if ended["status"] == "succeeded":
        screen.print(
            f"Done. Chat with it: coserve chat --adapter {ended['fine_tuned_model']}",
            soft_wrap=True,
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
    """Return the `method` of a job's body, which holds the hyperparameters in OpenAI's API."""
    hyperparameters = _given(n_epochs=epochs, batch_size=batch_size, beta=beta)
    return {"method": {"type": method, method: {"hyperparameters": hyperparameters}}}


def _afterwards(job_id: str) -> str:
    return (
        f"watch it    coserve jobs follow {job_id}\n"
        f"pause it    coserve jobs pause {job_id}\n"
        f"cancel it   coserve jobs cancel {job_id}"
    )


def _targets(text: str | None) -> str | list[str] | None:
    if text is None or text == "all-linear":
        return text
    return [name.strip() for name in text.split(",") if name.strip()]


def _given(**values: Any) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}
