"""Formats of records for objectives other than the next-token loss, each turned into sequences of
the usual kinds.

Preferences, as OpenAI has them (`input`, `preferred_output`, `non_preferred_output`) or as TRL has
them (`prompt`, `chosen`, `rejected`, each text or messages; without `prompt` it is what both begin
with); single answers with a `label`, true if it is wanted; tokens that were sampled, with their
log-probabilities and advantages.
"""

from collections.abc import Mapping
from typing import Any

from coserve.errors import DataError
from coserve.settings import is_number, is_whole
from coserve.tuning.json_records import Record, parsed_record
from coserve.tuning.line_formats import answered

_OPENAI = ("input", "preferred_output", "non_preferred_output")
_TRL = ("chosen", "rejected")


def read_pair(given: Any) -> tuple[Record, Record]:
    """Return the chosen and the rejected conversation (or prompt and completion) of a preference.

    Raises:
        DataError: The record is not a preference.
    """
    record = parsed_record(given)
    if all(name in record for name in _OPENAI):
        asked, chosen, rejected = (record[name] for name in _OPENAI)
        if not isinstance(asked, Mapping) or not isinstance(asked.get("messages"), list):
            raise DataError("input must be an object with messages")
        before, beside = asked["messages"], asked
    elif all(name in record for name in _TRL):
        chosen, rejected = (record[name] for name in _TRL)
        if "prompt" in record:
            before = record["prompt"]
        else:
            before, chosen, rejected = _without_prompt(chosen, rejected)
        beside = record
        if isinstance(before, str):
            return _completion(before, "chosen", chosen), _completion(before, "rejected", rejected)
    else:
        raise DataError(
            "a preference has input, preferred_output and non_preferred_output; or prompt, chosen "
            "and rejected"
        )
    return answered(before, chosen, beside), answered(before, rejected, beside)


def _without_prompt(chosen: Any, rejected: Any) -> tuple[Any, Any, Any]:
    """Return the common beginning of two whole texts, or conversations, and what follows it in
    each, as TRL's `extract_prompt` does.
    """
    if not isinstance(chosen, str | list) or type(chosen) is not type(rejected):
        raise DataError("chosen and rejected must both be text, or lists of messages")
    pairs = zip(chosen, rejected, strict=False)
    length = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(chosen), len(rejected)))
    if isinstance(chosen, str) and chosen[length - 1 : length] == " ":
        length -= 1  # the answer's first word brings it along
    return chosen[:length], chosen[length:], rejected[length:]


def read_labelled(given: Any) -> tuple[Record, bool]:
    """Return an answer, as prompt and completion or as messages, and whether it is wanted.

    Raises:
        DataError: The record is not a labelled answer.
    """
    record = dict(parsed_record(given))
    label = record.pop("label", None)
    if not isinstance(label, bool):
        raise DataError("an answer has a label, true if it is wanted and false if not")
    if isinstance(record.get("prompt"), list):
        return answered(record["prompt"], record.get("completion"), record), label
    return record, label


def read_sampled(given: Any) -> tuple[list[int], list[int], list[tuple[float, float]]]:
    """Return the tokens of a prompt and of what was sampled after it, and for each of the latter
    its advantage and its log-probability.

    Raises:
        DataError: The record is not a sampled answer.
    """
    record = parsed_record(given)
    prompt, completion = (_tokens(record, name) for name in ("prompt_tokens", "completion_tokens"))
    advantages = record.get("advantages")
    if is_number(advantages):
        advantages = [advantages] * len(completion)
    logprobs = record.get("logprobs")
    for name, numbers in (("advantages", advantages), ("logprobs", logprobs)):
        if (
            not isinstance(numbers, list)
            or len(numbers) != len(completion)
            or not all(map(is_number, numbers))
        ):
            raise DataError(
                f"{name} must be {len(completion)} numbers, one for each of completion_tokens"
            )
    assert isinstance(advantages, list) and isinstance(logprobs, list)
    return prompt, completion, list(zip(map(float, advantages), map(float, logprobs), strict=True))


def _tokens(record: Mapping[str, Any], name: str) -> list[int]:
    tokens = record.get(name)
    if (
        not isinstance(tokens, list)
        or not tokens
        or not all(is_whole(token, 0) for token in tokens)
    ):
        raise DataError(f"{name} must be a list of token ids that is not empty")
    return tokens


def _completion(prompt: str, name: str, answer: Any) -> Record:
    if not isinstance(answer, str):
        raise DataError(f"{name} must be a string, as prompt is")
    return {"prompt": prompt, "completion": answer}
