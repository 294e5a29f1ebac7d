"""Structured output: from what a body asks for to a grammar that is known to compile.

Each grammar is tried here before the engine hears of it, on threads of its own, a few at once: a schema
that asks for too much is answered with an error, and holds up neither this loop nor the engine's.
"""

import asyncio
import json
from collections import OrderedDict
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from coserve.devices.grammar import Grammar, Tag
from coserve.devices.matching import GrammarCompiler, Vocabulary
from coserve.errors import RequestError
from coserve.server.errors import ApiError
from coserve.server.prompts import Prompts
from coserve.server.schemas import ResponseFormat, SamplingBody, StructuredOutputs
from coserve.server.texts import check_texts
from coserve.worker.access import EngineAccess

# Grammars that are compiled at once; those that may be waiting or under way; those whose outcome is remembered.
_NUM_THREADS, _MOST_WAITING, _NUM_REMEMBERED = 2, 64, 1024
# What does not compile within this is refused; the compiler's own limits are reached earlier on most machines.
_COMPILE_S = 10.0
# Keywords of a JSON schema that map names to schemas.
_BY_NAME = ("properties", "patternProperties", "$defs", "definitions")
# A pattern that no white space matches: JSON without any.
_NO_WHITE_SPACE = "[ ]{0}"


class StructuredOutput:
    """Belongs to the event loop."""

    def __init__(self, prompts: Prompts, link: EngineAccess) -> None:
        self._prompts, self._link = prompts, link
        self._threads, self._free = ThreadPoolExecutor(_NUM_THREADS, "grammars"), asyncio.Semaphore(_NUM_THREADS)
        self._compiler: asyncio.Task[GrammarCompiler] | None = None
        self._outcomes: OrderedDict[Grammar, str | None] = OrderedDict()  # what is wrong with each
        self._trying: dict[Grammar, asyncio.Task[None]] = {}

    async def grammar(self, body: SamplingBody) -> Grammar | None:
        """What the output must follow, if anything; ApiError if it cannot be followed."""
        try:
            found = _asked(body)
        except ValueError as error:
            raise ApiError(str(error), param=_name(body)) from None
        if found is not None:
            await self.check(found, param=_name(body))
        return found

    async def check(self, grammar: Grammar, *, param: str) -> None:
        """Compile it, and see that the engine knows what tokens stand for; ApiError for a grammar that cannot be used.

        param: the field of the body that it comes from.
        """
        check_texts(grammar.text, param=param)
        try:
            compiler = await self._compiler_of_model()
        except RequestError as error:
            raise ApiError(str(error), param=param, code="unsupported_parameter") from None
        if grammar not in self._outcomes:
            await self._tried(grammar, compiler)
        if (wrong := self._outcomes[grammar]) is not None:
            raise ApiError(wrong, param=param)
        self._outcomes.move_to_end(grammar)
        self._link.use_vocabulary(compiler.vocabulary.pieces, compiler.vocabulary.special)

    def close(self) -> None:
        """End the threads."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _tried(self, grammar: Grammar, compiler: GrammarCompiler) -> None:
        """Its outcome is known after this; requests that bring the same grammar meanwhile wait for the same."""
        if grammar not in self._trying:
            if len(self._trying) >= _MOST_WAITING:
                raise _busy()
            self._trying[grammar] = asyncio.ensure_future(self._try(grammar, compiler))
        await asyncio.shield(self._trying[grammar])

    async def _try(self, grammar: Grammar, compiler: GrammarCompiler) -> None:
        try:
            try:
                await asyncio.wait_for(self._free.acquire(), _COMPILE_S)
            except TimeoutError:
                raise _busy() from None
            loop = asyncio.get_running_loop()
            working = self._threads.submit(_wrong_with, compiler, grammar)
            # Not before it has ended, although nobody may wait for it any longer.
            working.add_done_callback(lambda _: loop.call_soon_threadsafe(self._free.release))
            try:
                outcome = await asyncio.wait_for(asyncio.wrap_future(working), _COMPILE_S)
            except TimeoutError:
                outcome = f"the grammar takes longer than {_COMPILE_S:.0f} s to compile; make it smaller"
            self._outcomes[grammar] = outcome
            while len(self._outcomes) > _NUM_REMEMBERED:
                self._outcomes.popitem(last=False)
        finally:
            del self._trying[grammar]

    async def _compiler_of_model(self) -> GrammarCompiler:
        """Made for the first grammar, on a thread; RequestError without a tokenizer, or the library."""
        if self._compiler is None:
            self._compiler = asyncio.ensure_future(self._make_compiler())
        try:
            return await asyncio.shield(self._compiler)
        except RequestError:
            self._compiler = None
            raise

    async def _make_compiler(self) -> GrammarCompiler:
        pieces, special = await self._prompts.vocabulary(self._link.require_ready().vocab_size)
        vocabulary = Vocabulary(pieces, special, ())
        return await asyncio.get_running_loop().run_in_executor(self._threads, GrammarCompiler, vocabulary)


def _busy() -> ApiError:
    return ApiError(
        "too many grammars are being compiled; try again in a few seconds",
        status=503,
        kind="server_error",
        headers={"Retry-After": "2"},
    )


def _wrong_with(compiler: GrammarCompiler, grammar: Grammar) -> str | None:
    try:
        compiler.compile(grammar)
    except RequestError as error:
        return str(error)
    return None


def _name(body: SamplingBody) -> str:
    """The field that says what the output must follow."""
    names = ("structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar")
    return next((name for name in names if getattr(body, name) is not None), "response_format")


def _asked(body: SamplingBody) -> Grammar | None:
    """Return the grammar that a body asks for; ValueError says what is wrong with it."""
    asked = body.structured_outputs
    white_space = body.guided_whitespace_pattern
    if asked is not None and (asked.whitespace_pattern or asked.disable_any_whitespace):
        white_space = asked.whitespace_pattern or _NO_WHITE_SPACE
    found = [
        None if body.response_format is None else _of_format(body.response_format),
        None if asked is None else _of_structured_outputs(asked),
        None if body.guided_json is None else _json(body.guided_json),
        None if body.guided_regex is None else Grammar.regex(body.guided_regex),
        None if body.guided_choice is None else Grammar.choice(body.guided_choice),
        None if body.guided_grammar is None else Grammar.notation(body.guided_grammar),
    ]
    grammar = _only([each for each in found if each is not None])
    return grammar if grammar is None or not white_space else _with_white_space(grammar, white_space)


def _only(found: list[Grammar]) -> Grammar | None:
    """Return the one grammar of several that are all equal."""
    different = list(dict.fromkeys(found))
    if len(different) > 1:
        raise ValueError("only one of response_format, structured_outputs and guided_… can say what the output follows")
    return different[0] if different else None


def _with_white_space(grammar: Grammar, pattern: str) -> Grammar:
    """Return a JSON grammar whose white space between parts is what a regular expression allows."""
    if grammar.kind != "json_schema":
        return grammar
    lenient = grammar.is_lenient
    options = {"whitespace_pattern": pattern, "lenient": lenient, "coerce_one_of": lenient}
    schema = {**json.loads(grammar.text), "x-guidance": options}
    return Grammar(kind="lark", text=f"start: %json {json.dumps(schema)}")


def _of_format(asked: ResponseFormat) -> Grammar | None:
    if asked.type == "text":
        return None
    if asked.type in ("json_object", "json") and (schema := asked.schema_ or asked.value) is not None:
        return _json(schema)  # as llama.cpp, Together and TGI have it
    if asked.type == "json_object":
        return Grammar.json_object()
    if asked.type == "regex" and (pattern := asked.pattern or asked.value) is not None:
        return Grammar.regex(_text(pattern, "response_format.pattern"))
    if asked.type == "grammar" and asked.grammar is not None:
        return Grammar.notation(asked.grammar)
    if asked.type == "structural_tag":
        return _tags({"structures": asked.structures, "triggers": asked.triggers})
    if asked.type != "json_schema":
        raise ValueError(
            f"response_format must be of type text, json_object, json_schema or structural_tag, not {asked.type!r}"
        )
    if asked.json_schema is None and asked.schema_ is not None:
        return _json(asked.schema_)
    if asked.json_schema is None or asked.json_schema.schema_ is None:
        raise ValueError("response_format of type json_schema needs json_schema.schema")
    # As OpenAI has it: what is not strict follows the schema as far as it can be followed.
    return Grammar.json_schema(asked.json_schema.schema_, is_lenient=not asked.json_schema.strict)


def _of_structured_outputs(asked: StructuredOutputs) -> Grammar:
    is_closed = bool(asked.disable_additional_properties)
    found = [
        None if asked.json_ is None else _json(asked.json_, is_closed=is_closed),
        None if asked.regex is None else Grammar.regex(asked.regex),
        None if asked.choice is None else Grammar.choice(asked.choice),
        None if asked.grammar is None else Grammar.notation(asked.grammar),
        Grammar.json_object() if asked.json_object else None,
        None if asked.structural_tag is None else _tags(_read(asked.structural_tag)),
    ]
    given = [each for each in found if each is not None]
    if len(given) != 1:
        raise ValueError(
            "structured_outputs needs exactly one of json, regex, choice, grammar, json_object and structural_tag"
        )
    return given[0]


def _json(schema: str | dict[str, Any], *, is_closed: bool = False) -> Grammar:
    """Return the grammar of a schema. is_closed: objects have no properties but those that it names."""
    grammar = Grammar.json_schema(_read(schema) if isinstance(schema, str) else schema)
    return Grammar.json_schema(_closed(json.loads(grammar.text))) if is_closed else grammar


def _closed(schema: Any) -> Any:
    """Return a schema, which is not nested too deeply, whose objects with properties allow no others by default."""
    if isinstance(schema, list):
        return [_closed(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    closed: dict[str, Any] = {}
    for name, value in schema.items():
        if name in _BY_NAME and isinstance(value, dict):
            closed[name] = {key: _closed(inner) for key, inner in value.items()}
        else:
            closed[name] = value if name in ("enum", "const", "default") else _closed(value)
    if isinstance(schema.get("properties"), dict) and "patternProperties" not in schema:
        closed.setdefault("additionalProperties", False)
    return closed


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{name} must be a text")
    return value


def _read(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"what the output must follow is no JSON: {error}") from None


def _tags(asked: Any) -> Grammar:
    """vLLM's structural tags: text as the model likes, in which a trigger begins a tag with JSON of its schema."""
    structures = asked.get("structures") if isinstance(asked, Mapping) else None
    triggers = asked.get("triggers") if isinstance(asked, Mapping) else None
    try:
        tags = [Tag(begin=each["begin"], schema=each["schema"], end=each.get("end", "")) for each in structures or ()]
    except (KeyError, TypeError, AttributeError):
        tags = []
    if not tags or not triggers:
        raise ValueError("a structural tag needs triggers, and structures with begin, schema and end")
    return Grammar.triggered(tags, triggers=triggers)
