"""Checks of requests, examples and adapter names, before anything is queued."""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from coserve.devices.messages.commands import DeviceInfo
from coserve.devices.messages.jobs import OtherModel
from coserve.devices.sampling_params import SamplingParams
from coserve.engine.jobs.job import Job
from coserve.engine.request import virtual_tokens
from coserve.engine.served_adapters import AdapterVersion, AdapterVersions
from coserve.errors import AdapterError, JobError, RequestError
from coserve.settings import shown
from coserve.tuning.examples import Example


def check_request(
    prompt: Sequence[int],
    params: SamplingParams,
    info: DeviceInfo,
    version: AdapterVersion | None = None,
    *,
    has_text: bool,
) -> None:
    """Check that a request can be served at all.

    Args:
        version: Version of the request's adapter.
        has_text: Whether there is a tokenizer.

    Raises:
        RequestError: the message says what is wrong, and what would be right.
    """
    num_virtual = 0 if version is None else version.num_virtual_tokens
    vocab_size = (
        info.vocab_size if version is None or not version.vocab_size else version.vocab_size
    )
    if not prompt:
        raise RequestError("the prompt has no tokens")
    if params.stop and not has_text:
        raise RequestError("stop strings need a tokenizer, and this model has none")
    if min(prompt) < 0 or max(prompt) >= vocab_size:
        wrong = next(token for token in prompt if not 0 <= token < vocab_size)
        raise RequestError(
            f"token {wrong} of the prompt is out of vocabulary; the model has {vocab_size} tokens"
        )
    length = num_virtual + len(prompt) + params.max_tokens
    if length > info.max_positions:
        virtual = f"{num_virtual} virtual tokens of the adapter, " if num_virtual else ""
        raise RequestError(
            f"{virtual}{len(prompt)} tokens of prompt and {params.max_tokens} to come are "
            f"{length}; "
            f"the model has {info.max_positions} positions"
        )
    if (pages := info.num_state_pages + -(-length // info.block_tokens)) > info.num_pages:
        raise RequestError(
            f"{length} tokens need {pages} pages; there are {info.num_pages}: give the engine more "
            f"memory"
        )
    try:
        params.check_vocabulary(vocab_size)
    except ValueError as error:
        raise RequestError(str(error)) from None


def check_examples(
    examples: Sequence[Example], info: DeviceInfo | OtherModel, *, vocab_size: int = 0
) -> None:
    """Check that examples can be trained on.

    Args:
        info: The model that they are for.
        vocab_size: Vocabulary of the adapter that is trained further, where it has its own.

    Raises:
        JobError: the message names the example, and what would be right.
    """
    vocab_size = vocab_size or info.vocab_size
    for index, example in enumerate(examples):
        longest = max(len(tokens) for tokens, _ in example.sequences)
        if longest > info.max_positions:
            raise JobError(
                f"example {index} has {longest} tokens; the model has {info.max_positions} "
                "positions: lower max_sequence_length"
            )
        if not example.num_trained:
            raise JobError(f"example {index} has no token to train on")
        if not all(0 <= token < vocab_size for token in (min(example.tokens), max(example.tokens))):
            raise JobError(f"example {index} has a token beyond the model's {vocab_size}")


def with_virtual_tokens(
    examples: Sequence[Example], number: int, max_positions: int
) -> Sequence[Example]:
    """Return examples with the virtual tokens of an adapter before each sequence, none of which has
    a target.

    Raises:
        JobError: an example is too long then.
    """
    if not number:
        return examples
    longest = max((length for example in examples for length in example.lengths), default=0)
    if longest + number > max_positions:
        raise JobError(
            f"{number} virtual tokens and an example of {longest} tokens are more than the model's "
            f"{max_positions} "
            "positions: lower max_sequence_length or num_virtual_tokens"
        )
    return [_with_virtual_tokens(example, number) for example in examples]


def _with_virtual_tokens(example: Example, number: int) -> Example:
    tokens: list[int] = []
    trained: list[bool] = []
    for sequence, marks in example.sequences:
        tokens += [*virtual_tokens(number), *sequence]
        # The first token of a sequence has no target after the virtual ones, either.
        trained += [*(False,) * (number + 1), *marks[1:]]
    parts = tuple(number + length for length in example.parts)
    return replace(example, tokens=tuple(tokens), trained=tuple(trained), parts=parts)


def check_adapter_name(name: str, jobs: Iterable[Job], versions: AdapterVersions) -> None:
    """Check that a new adapter can have a name.

    Raises:
        AdapterError: the name is not valid, or it is taken by an adapter or a job.
    """
    if not isinstance(name, str) or not name or "@" in name:
        raise AdapterError(
            f"{shown(name)} is not a valid adapter name: it must not be empty or contain an @"
        )
    if any(job.name == name and not job.is_terminal for job in jobs):
        raise AdapterError(f"a job is making the adapter {name!r}")
    if name in versions:
        raise AdapterError(f"there is an adapter {name!r} already")
