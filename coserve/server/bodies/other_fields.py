"""Policy for fields of a request's body that the route does not have.

`client_fields` decides on fields that clients of other servers send. All other names are unknown:
they are ignored or refused, as `--unknown-fields` says. A likely misspelling of a known name is
refused unless all are to be ignored, since the client relies on its effect.
"""

import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import lru_cache
from typing import Any

from coserve.server.bodies.client_fields import FIELDS, ClientField
from coserve.server.errors import ApiError

_log = logging.getLogger(__name__)

HEADER = "x-coserve-ignored"
UNKNOWN_FIELDS = ("ignore", "warn", "refuse")
# Older names of `structured_outputs`: clients of vLLM send both, so that servers of any age
# understand one.
_OLDER_NAMES = (
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
    "guided_whitespace_pattern",
)
_MAX_NAME = 64
# A hostile body has a million names: this many are compared with known ones, shown in a header, and
# logged in all.
_MAX_COMPARED, _MAX_SHOWN, _MAX_LOGGED = 8, 32, 512
_SIMILAR = 0.7
# Names whose lengths differ by more are not compared: they differ by more than separators and two
# letters.
_MAX_SEPARATORS = 6


@dataclass(frozen=True, kw_only=True)
class BodyFields:
    """The fields of one kind of body."""

    known: Collection[str]
    """Names of the fields that the body has."""
    # Known fields without effect, which the header names where they are given.
    unused: Collection[str] = ()
    # This body's names for fields that `client_fields` calls otherwise.
    renamed: Mapping[str, str] = field(default_factory=dict)
    # Begins the names of its fields, such as "stream_options.".
    prefix: str = ""


class FieldPolicy:
    """Policy for fields of bodies; one object serves all requests, from any thread."""

    def __init__(self, unknown: str = "refuse") -> None:
        """Treat unknown fields in one of the ways of `UNKNOWN_FIELDS`."""
        self._unknown = unknown
        self._logged: set[str] = set()

    def sort(self, data: Mapping[str, Any], body: BodyFields) -> tuple[dict[str, Any], list[str]]:
        """Return the fields that the body has, translated from other names, and the names of
        ignored ones.

        Raises:
            ApiError: A field would change the answer and is not supported, or is unknown and to be
                refused.
        """
        fields = {name: value for name, value in data.items() if name in body.known}
        ignored = [name for name in body.unused if data.get(name) is not None]
        unknown = {}
        for name, value in data.items():
            if name in body.known:
                continue
            if (row := FIELDS.get(name)) is None:
                unknown[name] = value
            elif value is not None:
                ignored += _translate(row, value, data, fields, body)
        if fields.get("structured_outputs") is not None:
            older = [name for name in _OLDER_NAMES if fields.pop(name, None) is not None]
            ignored += older
        return fields, ignored + self.pass_over(unknown, body)

    def pass_over(self, unknown: Mapping[str, Any], body: BodyFields) -> list[str]:
        """Return the names of unknown fields to ignore, escaped for a header.

        The first occurrence of each name is logged. A field that is null asks for nothing.

        Raises:
            ApiError: Unknown fields are refused.
        """
        names = [
            name
            for name, value in unknown.items()
            if value is not None or self._unknown == "refuse"
        ]
        suggested = [
            *body.known,
            *(row.name for row in FIELDS.values() if row.action != "ignored" and not body.prefix),
        ]
        for name in names[:_MAX_COMPARED]:
            if self._unknown == "refuse":
                raise _unknown_field(
                    body.prefix + name, get_close_matches(name[:_MAX_NAME], body.known, 1, _SIMILAR)
                )
            if self._unknown == "warn" and (near := _misspelt(name, suggested)) is not None:
                raise _unknown_field(body.prefix + name, [near])
        shown = [_shown(body.prefix + name) for name in names[:_MAX_SHOWN]]
        if self._unknown == "warn":
            for name in shown:
                self._log_once(name)
        return shown

    def reported(self, ignored: Collection[str]) -> tuple[str, ...]:
        """Return the names for the answer's header."""
        return () if self._unknown == "ignore" else tuple(sorted(set(ignored)))[:_MAX_SHOWN]

    def _log_once(self, name: str) -> None:
        if name not in self._logged and len(self._logged) < _MAX_LOGGED:
            self._logged.add(name)
            _log.warning("requests have a field %s, which is unknown and ignored", name)


def _translate(
    row: ClientField, value: Any, data: Mapping[str, Any], fields: dict[str, Any], body: BodyFields
) -> list[str]:
    """Add the meaning of another server's field to `fields`; return the names of what is ignored of
    it.
    """
    if row.action == "ignored":
        return [row.name]
    if row.reader is None:
        return _refuse(row, value, row.name)
    try:
        meaning = row.reader(value, data)
    except ValueError as error:
        raise ApiError(
            f"{row.name} {error}", param=row.name, code="unsupported_parameter"
        ) from None
    ignored = [
        f"{row.name}.{key}"
        for key in row.ignored_keys
        if isinstance(value, dict) and value.get(key)
    ]
    for target, meant in meaning.items():
        name = body.renamed.get(target, target)
        own = fields.get(name)
        if name not in body.known:
            ignored += _without_target(row, target, meant)
        elif name == "stream_options" and isinstance(own, dict):
            fields[name] = {**meant, **own}
        elif own not in (None, meant):
            ignored.append(row.name)  # the body has it by its own name as well
        else:
            fields[name] = meant
    return ignored


def _without_target(row: ClientField, target: str, meant: Any) -> list[str]:
    """Treat a field that means another one, which the route does not have, as that one."""
    counterpart = FIELDS.get(target)
    if counterpart is None or counterpart.action != "refused":
        return [row.name]
    return _refuse(counterpart, meant, row.name)


def _refuse(row: ClientField, value: Any, name: str) -> list[str]:
    """Refuse a field that came by `name`, unless its value asks for nothing.

    Returns:
        No names to ignore.

    Raises:
        ApiError: The value asks for something.
    """
    if value in row.neutral:
        return []
    raise ApiError(
        f"{name} is not supported here: {row.note}", param=name, code="unsupported_parameter"
    )


def _unknown_field(name: str, near: list[str]) -> ApiError:
    hint = f" Did you mean '{near[0]}'?" if near else ""
    return ApiError(f"Unknown parameter: '{name}'.{hint}", param=name, code="unknown_parameter")


def _misspelt(name: str, known: Collection[str]) -> str | None:
    """Return the known name that a name is a misspelling of.

    It has other case or separators, or one or two wrong letters.
    """
    if len(name) > _MAX_NAME:
        return None
    plain = _plain(name)
    max_edits = 0 if len(name) < 4 else 1 if len(name) < 9 else 2
    for other in known:
        if abs(len(name) - len(other)) > _MAX_SEPARATORS:
            continue
        if plain == _plain(other) or _edits(name, other, max_edits) <= max_edits:
            return other
    return None


@lru_cache(maxsize=2048)
def _plain(name: str) -> str:
    return name.replace("_", "").replace("-", "").casefold()


def _edits(one: str, other: str, limit: int) -> int:
    """Return how many letters must be changed, added, removed or swapped; any number above `limit`
    if more.
    """
    if abs(len(one) - len(other)) > limit:
        return limit + 1
    before: list[int] = []
    row = list(range(len(other) + 1))
    for i, letter in enumerate(one, 1):
        before, last, row = row, before, [i]
        for j, expected in enumerate(other, 1):
            best = min(before[j] + 1, row[j - 1] + 1, before[j - 1] + (letter != expected))
            if i > 1 and j > 1 and letter == other[j - 2] and one[i - 2] == expected:
                best = min(best, last[j - 2] + 1)
            row.append(best)
        if min(row) > limit:
            return limit + 1
    return row[-1]


def _shown(name: str) -> str:
    """Return a client's name escaped for headers and logs."""
    text = ascii(name[:_MAX_NAME])[1:-1].replace(",", "")
    return text if len(name) <= _MAX_NAME else f"{text}..."
