"""YAML files and `key=value` composed left to right into one Config, with the origin of every key."""

from __future__ import annotations

import contextlib
import difflib
import os
import re
import reprlib
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import yaml
from pydantic import ValidationError
from pydantic.fields import FieldInfo

from dynamo_megatron.config import Config, shipped
from dynamo_megatron.config.peer_keys import PREFIX, ours
from dynamo_megatron.config.reward import WITH_SETTINGS
from dynamo_megatron.errors import ConfigError
from dynamo_megatron.runtime.plain_text import on_one_line

Layer = tuple[str, Mapping[str, Any]]  # what messages call it, and the sections that it sets
# A user alone is a token for HTTP; docker://USER@REGISTRY and the like take the password from elsewhere.
USER_IN_URL = re.compile(r"\b([\w.+-]*https?://[^/?#\s@]*|[a-z][a-z0-9+.-]*://[^/?#\s@:]*:[^/?#\s@]*)@", re.IGNORECASE)
SECRET_PARAMETER = re.compile(  # by their whole names: max_token, cache_key and sort_key are not secrets
    r"(https?://|datasets:)\S*[?&;](key|token|auth|pass|sig|([\w-]+[-_])?(secret|password|passwd|passphrase|signature"
    r"|(api|access|secret|private|account|auth)[-_]?key|(access|auth|security|refresh|id|bearer|hf)[-_]?token))=",
    re.IGNORECASE,
)


def _sections(kind: Any, at: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], dict[str, FieldInfo]]]:
    """The path of each section, and its keys; `kind`: a section, or Section | None."""
    fields = getattr(kind, "__pydantic_fields__", {})  # of a model or a pydantic dataclass
    if fields:
        yield at, {field.alias or name: field for name, field in fields.items()}
    for name, field in fields.items():
        yield from _sections(field.annotation, (*at, field.alias or name))
    for option in typing.get_args(kind):
        yield from _sections(option, at)


def _is_text(kind: Any) -> bool:
    """Whether an annotation is str or an optional str."""
    if typing.get_origin(kind) is typing.Annotated:
        return _is_text(typing.get_args(kind)[0])
    options = [option for option in typing.get_args(kind) if option is not type(None)]
    return kind is str or (typing.get_origin(kind) in (typing.Union, types.UnionType) and all(map(_is_text, options)))


SECTIONS = dict(_sections(Config))
KEYS = [(*at, name) for at, names in SECTIONS.items() for name in names]
TEXTS = {(*at, name) for at, fields in SECTIONS.items() for name, field in fields.items() if _is_text(field.annotation)}
SEE_ALL = "--print-config shows all keys"
OF_MACHINE = ("servers", "memory_fraction", "host")  # keys of `rollout` that depend on the machine where unset


class _Part(dict):
    """Of a dotted key on the command line, which sets one entry of a mapping."""

    def within(self, mapping: Mapping[str, Any]) -> dict[str, Any]:
        """`mapping` with this entry."""
        ((name, value),) = self.items()
        if isinstance(value, _Part):
            there = mapping.get(name)
            value = value.within(there if isinstance(there, Mapping) else {})
        return {**mapping, name: value}


def compose(
    files: Sequence[str], overrides: Sequence[str], defaults: Mapping[str, Any] | None = None, context: Any = None
) -> tuple[Config, dict[str, str]]:
    """The config, and for every dotted key that was set the file or override that set it last.

    `files`: paths, or names of shipped configurations (`methods/dynamo`). A file's `base` names another one that is
    composed before it: one beside it, or as here. `defaults`: sections that files and overrides are merged into.
    `context`: EVALUATION or None. Raises ConfigError: a file that is missing or not YAML, or with a line for each fault
    an unknown key (with the nearest known one, or ours for one of verl's or slime's), a wrong type, a missing key.
    """
    layers, faults = [("the command", defaults or {})], []
    for read, word in [*((_file_layers, word) for word in files), *((_override, word) for word in overrides)]:
        try:
            layers += read(word)
        except ConfigError as error:
            faults.append(str(error))
    if faults:  # what could not be read may have set what is missing now
        raise ConfigError("\n".join(faults))
    tree: dict[str, Any] = {"model": {}, "data": {}}  # so that missing keys in them are named one by one
    origins: dict[str, str] = {}
    for origin, sections in layers:
        faults += _merge(tree, sections, (), origin, origins)
    if secrets := list(_secrets(tree, origins)):
        raise ConfigError("\n".join(dict.fromkeys(secrets)))  # before anything else shows the value
    try:
        config = Config.model_validate(tree, context=context)
    except ValidationError as error:
        faults += _lines(error, origins)
    if faults:
        raise ConfigError("\n".join(dict.fromkeys(map(on_one_line, faults))))
    return config, origins


def _merge(
    into: dict[str, Any], new: Mapping, at: tuple[str, ...], origin: str, origins: dict[str, str]
) -> Iterator[str]:
    """Sets the keys of `new` in the section `into`, whose path is `at`. Yields a line for each unknown key."""
    for name, value in new.items():
        path = (*at, str(name))
        if str(name) not in SECTIONS[at]:
            # Of a pasted section of verl each key that has a name here is answered.
            inner = {".".join(leaf): _peer(leaf) for leaf, _ in _leaves(value, path)}
            known = {key: hint for key, hint in inner.items() if hint is not None}
            near = _nearest(path)
            whole = next(iter(inner)) if len(inner) == 1 and near == SEE_ALL else ".".join(path)
            for key, hint in (known or {whole: near}).items():
                yield f"{origin}: unknown key {key}; {hint}"
        elif isinstance(value, Mapping) and path in SECTIONS:
            into[name] = into[name] if isinstance(into.get(name), dict) else {}
            yield from _merge(into[name], value, path, origin, origins)
        else:
            field = SECTIONS[at][name]
            given = value is not None or isinstance(new, _Part) or type(None) in _kinds(field.annotation)
            if path in SECTIONS and not given:
                continue  # a section whose keys are all comments
            if isinstance(value, bool) and bool not in (kinds := {*_kinds(field.annotation)}) and kinds & {int, float}:
                yield f"{origin}: {'.'.join(path)}: needs a number, got {str(value).lower()}"
                continue
            if isinstance(value, _Part) and isinstance(there := into.get(name, field.default), Mapping):
                value = value.within(there)
            into[name] = os.path.expanduser(value) if isinstance(value, str) and value.startswith("~/") else value
            key = ".".join(path)
            for below in [known for known in origins if known.startswith(f"{key}.")]:
                del origins[below]
            origins[key] = origin


def _kinds(annotation: Any) -> Iterator[Any]:
    yield annotation
    for inner in typing.get_args(annotation):
        yield from _kinds(inner)


def _peer(path: tuple[str, ...]) -> str | None:
    if path[:1] == (PREFIX.removesuffix("."),) and path[1:] in KEYS:
        return f"here it is {'.'.join(path[1:])}"
    return ours(".".join(path))


def _leaves(value: Any, at: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    if isinstance(value, Mapping) and value:
        for name, inner in value.items():
            yield from _leaves(inner, (*at, str(name)))
    else:
        yield at, value


def _secrets(tree: Mapping[str, Any], origins: Mapping[str, str]) -> Iterator[str]:
    """A line for every string that is a URL with a user, a password or a key in it, which it does not show."""
    for path, value in _leaves(tree, ()):
        for text in map(str, value if isinstance(value, list) else [value]):
            if USER_IN_URL.search(text) or SECRET_PARAMETER.search(unquote(text)):
                key = ".".join(path)
                yield (
                    f"{origins.get(key, '')}: {key}: the URL has a user, password or key in it, which would be written "
                    "to config.yaml, logs and messages; give it to the job's environment: HF_TOKEN for datasets, a "
                    "variable that api_key_env names for services"
                ).lstrip(": ")


def _file_layers(word: str) -> list[Layer]:
    return _with_base(*_locate(word), ())


def _with_base(path: Path, name: str, above: tuple[Path, ...]) -> list[Layer]:
    """The file's own sections after those of its `base`, and of that one's. Raises ConfigError."""
    sections = read_yaml(path, name)
    if (base := sections.pop("base", None)) is None:
        return [(name, sections)]
    if not isinstance(base, str):
        raise ConfigError(f"{name}: base: name one config file, not {base!r}")
    beside = path.parent / f"{base.removesuffix('.yaml')}.yaml"
    found = (beside, _shown(beside)) if beside.is_file() else _locate(base)
    if found[0] in (path, *above):
        raise ConfigError(f"{name}: base: {base} has this file as its own base")
    return [*_with_base(*found, (path, *above)), (name, sections)]


def _locate(word: str) -> tuple[Path, str]:
    """The file that a word of the command line names, and what messages call it. Raises ConfigError."""
    for name in (word, f"{word}.yaml"):
        if os.path.isfile(name):
            return Path(name), name
    if (path := shipped.path(word)) is not None:
        return path, _shown(path)
    if os.path.isdir(word):
        raise ConfigError(f"{word}: is a folder; name a config file in it")
    if tuple(word.split(".")) in KEYS:
        raise ConfigError(f"{word}: is a key, not a config file; set it with {word}=VALUE, without blanks around the =")
    near = difflib.get_close_matches(word, [*shipped.names(), *map(str, Path().glob("*.yaml"))], 1)
    hint = f"did you mean {near[0]}?" if near else "`dynamo-megatron configs` lists those; a key is set with key=value"
    raise ConfigError(f"{word}: no such config file, nor a shipped one; {hint}")


def _shown(path: Path) -> str:
    if path.is_relative_to(shipped.folder()):
        return f"{path.relative_to(shipped.folder()).with_suffix('')} (shipped)"
    return str(path)


def read_yaml(path: Path, name: str) -> dict[str, Any]:
    """The mapping that a file holds; empty for an empty file. Raises ConfigError that calls the file `name`."""
    try:
        content = _parse(path.read_text(encoding="utf-8"), name)
    except UnicodeDecodeError as error:
        raise ConfigError(f"{name}: not UTF-8 text ({error})") from None
    except OSError as error:
        raise ConfigError(f"{name}: cannot be read: {error.strerror}") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(f"{name}: a config is a mapping of sections, this is a {type(content).__name__}")
    return content


def _override(word: str) -> list[Layer]:
    """`a.b=text` as {"a": {"b": value}}. Raises ConfigError."""
    key, equals, text = word.partition("=")
    if not equals or not all(key.split(".")):
        raise ConfigError(f"{word!r}: neither a file nor key=value")
    if not text.strip():
        raise ConfigError(f"{word}: no value; give {key}=VALUE, {key}=null for none or {key}='\"\"' for no text")
    if tuple(key.split(".")) in TEXTS:
        nested: Any = _text(text.strip())
    elif isinstance(nested := _parse(text, word), str) and text.lstrip()[0] not in "\"'|>!&":
        nested = text.strip()  # YAML would end it at a #, and join its lines
    for part in reversed(key.split(".")):
        nested = _Part({part: nested})
    return [("the command line", nested)]


def _text(text: str) -> str | None:
    """The value of a text option: quotes around it are removed, and everything else is kept, even if YAML would read it
    as a number, a mapping or a comment."""
    if text[0] in "\"'":
        with contextlib.suppress(yaml.YAMLError, ValueError):
            if isinstance(quoted := yaml.load(text, _Loader), str):
                return quoted
    return None if text == "null" else text


class _Loader(yaml.SafeLoader):
    """Refuses a key that a mapping has twice: YAML's libraries let the last one win. 010 is not read as 8, nor 1:30 as
    90: both stay text. A key for numbers takes 010 as 10 and refuses 1:30."""

    def construct_yaml_int(self, node: yaml.ScalarNode) -> int | str:
        return node.value if re.match(r"[-+]?0[0-9_]|.*:", node.value) else super().construct_yaml_int(node)

    def construct_yaml_float(self, node: yaml.ScalarNode) -> float | str:
        return node.value if ":" in node.value else super().construct_yaml_float(node)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        seen = set()
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            if key.value in seen:
                raise yaml.MarkedYAMLError(problem=f"{key.value} is there twice", problem_mark=key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep)


_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_yaml_int)
_Loader.add_constructor("tag:yaml.org,2002:float", _Loader.construct_yaml_float)


def _parse(text: str, what: str) -> Any:
    try:
        return yaml.load(text, _Loader)
    except (yaml.YAMLError, ValueError) as error:  # ValueError: of a date such as 2026-99-99
        mark = getattr(error, "problem_mark", None)
        line = f":{mark.line + 1}" if mark and "=" not in what else ""
        problem = getattr(error, "problem", None) or str(error)
        raise ConfigError(f"{on_one_line(what, 200)}{line}: not YAML ({on_one_line(problem, 200)})") from None


def _nearest(path: tuple[str, ...]) -> str:
    """Which key was probably meant by an unknown one."""
    name = path[-1]
    if elsewhere := [".".join(key) for key in KEYS if key[-1] == name]:
        return f"the nearest key is {difflib.get_close_matches('.'.join(path), elsewhere, 1, cutoff=0)[0]}"
    if near := difflib.get_close_matches(name, SECTIONS[path[:-1]], 1, cutoff=0.7):
        return f"did you mean {'.'.join((*path[:-1], near[0]))}?"
    return SEE_ALL


def _lines(error: ValidationError, origins: Mapping[str, str]) -> Iterator[str]:
    """A line for each fault that pydantic has found."""
    faults: dict[str, list[Any]] = {}
    for fault in error.errors():  # a value of several types has one for each of them
        if fault["type"] != "default_factory_not_called":  # the fault that kept it from being called is there, too
            faults.setdefault(_key(fault["loc"]), []).append(fault)
    for key, (fault, *others) in faults.items():
        if fault["type"] == "missing" and isinstance(fault["loc"][-1], str):
            yield f"{key}: missing; set it in a config file or with {key}=..."
            continue
        message = " or ".join([fault["msg"], *(other["msg"] for other in others)]).removeprefix("Value error, ")
        given = "" if fault["type"] == "value_error" else f", got {reprlib.repr(fault['input'])}"
        if fault["type"] in ("list_type", "tuple_type"):
            given += f"; give a list, as in {key}=[...]"
        if fault["type"] == "string_type" and fault["input"] is not None:
            given += "; put a text that YAML takes for something else in quotes"
        for one in message.split("\n"):  # a check across keys may have found several faults
            named = one.partition(":")[0]  # by a check across keys
            at = (key, key.rpartition(".")[0], f"{key}.{named}", named)
            origin = next((f"{origins[k]}: " for k in at if k in origins), "")
            yield f"{origin}{key}: {one}{given}" if key else f"{origin}{one}"


def _key(loc: Sequence[str | int]) -> str:
    """Dotted, without what pydantic adds for a value of several types."""
    at: tuple[str, ...] = ()
    for part in loc:
        if isinstance(part, str) and part not in SECTIONS.get(at, ()):
            break
        at = (*at, str(part))
    return ".".join(at)


def to_plain(config: Config) -> dict[str, Any]:
    """The config as plain data, as `config.yaml` holds it: without unset keys of OF_MACHINE."""
    plain, given = config.model_dump(mode="json"), config.rollout.model_fields_set
    plain["rollout"] = {key: value for key, value in plain["rollout"].items() if key not in OF_MACHINE or key in given}
    return plain


def read_saved(file: Path) -> dict[str, Any]:
    """A run's config.yaml; keys that came to the config since then have their defaults. Raises ConfigError."""
    plain = read_yaml(file, str(file))
    with contextlib.suppress(ValidationError):  # a key is gone since then: it is named among those that differ
        return to_plain(Config.model_validate(plain))
    return plain


def describe(config: Config, origins: Mapping[str, str], derived: Mapping[str, Any]) -> str:
    """Every key with its value and who set it, then what follows from them."""
    lines: list[str] = []

    def walk(node: Any, at: tuple[str, ...]) -> None:
        for name, value in node.items():
            path, indent = (*at, name), "  " * len(at)
            if isinstance(value, dict) and path in SECTIONS:
                lines.append(f"{indent}{name}:")
                walk(value, path)
            else:
                text = yaml.safe_dump(value, default_flow_style=True, width=10**6).strip().removesuffix("\n...")
                lines.append(f"{indent}{name}: {text}  # {origins.get('.'.join(path), 'default')}")

    walk(config.model_dump(mode="json"), ())
    lines.append("# derived")
    lines.extend(f"#   {name}: {value}" for name, value in derived.items())
    return "\n".join(lines)


# What makes a run the same run: everything but steps, learning rate, layout, servers and logging.
_IDENTITY = (
    *("model", "data", "seed", "algorithm", "dpo", "critic.path", "critic.value_clip", "critic.warmup_steps"),
    *("reward.functions", "reward.fusion", "reward.success_threshold"),
    *("reward.format", "reward.length", "reward.prime"),
    *("reward.code.score", "reward.code.tests", "reward.reward_model.path", "reward.reward_model.range"),
    *(f"reward.judge.{name}" for name in ("model", "template", "pattern", "range", "request")),
    *(f"rollout.{name}" for name in ("agent", "temperature", "max_new_tokens", "max_staleness", "stop")),
)
_SCORED = (
    *(f"data.{name}" for name in ("prompt_key", "answer_key", "id_key", "template", "chat_template", "template_args")),
    *("data.system_prompt", "data.few_shot", "rollout.stop", "rollout.agent", "rollout.agent_turns"),
    *("eval.limit", "eval.samples", "reward.deadline", "reward.on_error", "reward.code"),
    *(key for key in _IDENTITY if key.startswith("reward.") and key != "reward.fusion"),
)


def scored_by(config: Config) -> dict[str, Any]:
    """dotted key -> value of all that pass@k depends on besides the model, the seed and k."""
    plain, own, rollout = to_plain(config), config.eval, config.rollout
    plain["reward"]["functions"] = config.reward.functions[:1]  # which says whether a response is right
    found = identity(plain, (*_SCORED, *(["data.limit"] if own.data is None else []))) | {
        "eval.data": own.data or config.data.source,
        "eval.temperature": rollout.temperature if own.temperature is None else own.temperature,
        "eval.max_new_tokens": own.max_new_tokens or rollout.max_new_tokens,
    }
    if rollout.agent is not None:  # what its requests and their answers depend on
        longest = config.model.max_length
        found |= {"rollout.tool_parser": rollout.tool_parser, "model.max_length": longest}
        found["rollout.agent_tokens"] = rollout.agent_tokens or max(config.trainer.micro_batch_tokens, longest or 0)
    return found


def differing(here: Mapping[str, Any], there: Mapping[str, Any]) -> list[str]:
    """The keys whose values differ, in order; a key that one of the two lacks has None."""
    return [key for key in dict.fromkeys([*here, *there]) if here.get(key) != there.get(key)]


def identity(plain: Mapping[str, Any], keys: Sequence[str] = _IDENTITY) -> dict[str, Any]:
    """dotted key -> value of all that `keys` names, by default what may not change when a run is resumed, without
    the settings of rewards that are none of `reward.functions`; `plain` as from `to_plain`."""
    found: dict[str, Any] = {}
    for key in keys:
        node: Any = plain
        for part in key.split("."):
            node = node.get(part) if isinstance(node, Mapping) else None
        found |= {".".join(path): value for path, value in _leaves(node, (key,))}
    if isinstance(functions := found.get("reward.functions"), list):
        unused = tuple(f"reward.{name}." for name in WITH_SETTINGS if name not in functions)
        found = {key: value for key, value in found.items() if not key.startswith(unused)}
    for name in ("old_logprobs", "teacher.api_key_env"):  # these change nothing
        found.pop(f"algorithm.{name}", None)
    if str(found.get("algorithm.teacher.path", "")).startswith("http"):  # as a judge's, a server's address may change
        del found["algorithm.teacher.path"]
    if "data.shuffle_seed" in found and found["data.shuffle_seed"] is None:
        found["data.shuffle_seed"] = plain.get("seed")
    return found
