"""Errors in a user's configuration, on the command line or in a file: one clear message each, with file and line."""

from __future__ import annotations

import itertools
import re
import typing
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

from launcher.config.added_groups import option_files
from launcher.config.foreign_keys import translation
from launcher.config.schema import WITH_TARGET, Config, facts_by_key, group_kinds, known_keys
from launcher.errors import ConfigError, did_you_mean

# names that other programs use for an option, which do not resemble it
_OTHER_NAMES = {
    "float16": "fp16", "half": "fp16", "16-mixed": "fp16", "bfloat16": "bf16", "bf16-mixed": "bf16", "float32": "fp32",
    "float": "fp32", "32-true": "fp32", "no": "fp32", "fp8": "float8", "fsdp2": "fsdp", "deepspeed": "fsdp",
    "zero2": "fsdp", "zero3": "fsdp", "full_shard": "fsdp", "hybrid_shard": "hsdp", "adam": "adamw",
    "adamw_torch": "adamw", "adamw_torch_fused": "adamw", "momentum": "sgd",
}  # fmt: skip
_FREE = ("task", "hydra", *WITH_TARGET)  # groups with keys that the schema does not know
_DIR_FLAGS = ("--config-dir", "-cd")


def directories(arguments: Sequence[str]) -> list[Path]:
    """Return the configuration directories that the command line names."""
    places = [after for flag, after in itertools.pairwise(arguments) if flag in _DIR_FLAGS]
    places += [argument.partition("=")[2] for argument in arguments if argument.startswith("--config-dir=")]
    return [Path(place) for place in places]


def require_directories(arguments: Sequence[str]) -> None:
    """Check that the directories of --config-dir exist.

    Raises:
        ConfigError: one does not.
    """
    for place in directories(arguments):
        if not place.is_dir():
            raise ConfigError("--config-dir", place, "there is no such directory.", f"Searched in {Path.cwd()}.")


# keys that were removed, or groups of them, with what to use instead
_REMOVED = {
    "cluster.link_gbit": "Leave it out: times are not predicted. `launch doctor` measures the links.",
    "train.predict": "Leave it out: times are not predicted, and memory is where the plan depends on it.",
    "cluster.env": "Leave it out: workers get the whole environment of the job (docs/reference/cli.md).",
    "cluster.key": "Run the hosts on a private network or a tunnel such as WireGuard: docs/guides/hosts.md.",
    **dict.fromkeys(
        ("prometheus", "prometheus.port", "prometheus.textfile", "trackio", "trackio.project"),
        "Other trackers are packages of their own (docs/guides/trackers.md); metrics.jsonl has every record for them.",
    ),
    "strategy.compress_parameters": "Use precision=bf16, which gathers matrices in two bytes each.",
    **dict.fromkeys(
        ("outer.store", "outer.sites", "outer.site", "outer.key", "outer.patience_s", "outer.compress"),
        "Sites are groups of ranks of a job (outer.group); for separate jobs, torchft (docs/explanations/outer.md).",
    ),
}


def _remedy(key: str, known: Sequence[str]) -> str:
    """Return advice about a key that does not exist."""
    renamed = {facts.was: f"Write {name}." for name, facts in facts_by_key().items() if facts.was}
    group, _, leaf = key.rpartition(".")
    if former := _REMOVED.get(key) or _REMOVED.get(group) or renamed.get(key):
        return former
    beside = [name for name in known if group and name.startswith(f"{group}.")]
    foreign = translation(key)
    if foreign and f"{group}." not in foreign:  # the key of this group may be meant that has a similar name
        for name in beside:
            first, second = sorted((f"{key}_", f"{name}_"))
            if second.startswith(first) or (len(beside) == 1 and leaf.endswith(f"_{name.rpartition('.')[2]}")):
                return f"did you mean '{name}'? Otherwise: {foreign}"
    return foreign or _nearest(key, known)


def require_known_keys(arguments: Sequence[str]) -> None:
    """Reject misspelt keys with a leading +, which Hydra would add to the config silently.

    Raises:
        ConfigError: there is no such key.
    """
    known, own_groups = known_keys(), _own_groups(arguments)
    for argument in arguments:
        key, _, value = argument.lstrip("+").partition("=")
        free = key.split(".")[0] in _FREE or "/" in key or "@" in key
        if argument.startswith("+") and not free and key not in (*known, *own_groups):
            remedy = _remedy(key, [*known, *own_groups])
            if "." not in key and not own_groups and not translation(key):
                remedy += " Groups of your own are read from --config-dir DIR."
            raise ConfigError(key, value, "there is no such key.", remedy)


def _own_groups(arguments: Sequence[str]) -> list[str]:
    """Return the groups in the directories of --config-dir."""
    return [group.name for place in directories(arguments) for group in sorted(place.glob("*/"))]


@contextmanager
def in_plain_words(arguments: Sequence[str]) -> Generator[None]:
    """Reword the errors that Hydra and OmegaConf raise in the body.

    Raises:
        ConfigError: instead of theirs.
    """
    from hydra.errors import HydraException, MissingConfigException, OverrideParseException
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    try:
        yield
    except MissingConfigException as error:
        raise _explain_missing(error.missing_cfg_file or "", error.options or [], str(error), arguments) from None
    except OverrideParseException as error:
        raise _explain_grammar(error.override, error.message) from None
    except YAMLError as error:
        raise _explain_yaml(error) from None
    except UnicodeDecodeError:
        raise _explain_encoding(arguments) from None
    except (HydraException, OmegaConfBaseException, ValueError) as error:
        raise _explain(error, arguments) from None


def _explain_grammar(override: str, message: str) -> ConfigError:
    """Return the error for an override that violates Hydra's grammar. ``message``: Hydra's, several lines."""
    key, _, value = override.partition("=")
    why = next(line for line in message.splitlines() if not line.startswith("Error parsing override"))
    if why.startswith("LexerNoViableAltException"):
        why = "a quote is left open, or a character is not allowed"
    return ConfigError(
        key.lstrip("+~"), value, f"cannot be read as an override: {why}.",
        "Close every bracket and quote, and quote other special characters for Hydra too: 'key=\"a, b{\"'.",
    )  # fmt: skip


def _explain_yaml(error: Any) -> ConfigError:
    """Return the message for a file that is not YAML. ``error``: yaml.YAMLError."""
    mark = getattr(error, "problem_mark", None)
    if mark is None:
        return ConfigError("config", None, " ".join(str(error).split()))
    what = getattr(error, "problem", None) or "it cannot be read"
    return ConfigError(f"{_near(Path(mark.name))}, line {mark.line + 1}", None, f"is not valid YAML: {what}.")


def _explain_encoding(arguments: Sequence[str]) -> ConfigError:
    for file in _own_files(arguments):
        try:
            file.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            return ConfigError(_near(file), None, "is not UTF-8 text.", "Save it in the encoding UTF-8.")
    return ConfigError("config", None, "a configuration file is not UTF-8 text.")


def _explain_missing(place: str, options: Sequence[str], text: str, arguments: Sequence[str]) -> ConfigError:
    """Return the error for a file that Hydra did not find. ``place``: GROUP/OPTION; ``text``: Hydra's message."""
    group, _, option = place.rpartition("/")
    if text.startswith("Primary config"):
        return ConfigError(
            "--config-path", None, "there is no such directory of configurations.",
            "To add files of your own to the launcher's, use --config-dir DIR.",
        )  # fmt: skip
    if not group:
        return ConfigError(
            "--config-name", place or None, "there is no such configuration file.",
            "It is NAME.yaml in the directory of --config-dir, without the ending.",
        )  # fmt: skip
    match = re.match(r"In '([^']+)'", text)
    file = None if match is None else _file(match[1], arguments)
    name = group.rpartition("/")[2]
    if file is not None and not options and name != group and name in known_keys():
        return ConfigError(
            f"{_near(file)}{_at_line(file, name)}: {name}", None, f"there is no file {place}.yaml.",
            f"To choose an option of the group {name}, write `- override /{name}: {option}`.",
        )  # fmt: skip
    return _unknown_option(group, option, options, _chosen_in(group, option, arguments) or group)


def _unknown_option(group: str, option: str, options: Sequence[str], where: str) -> ConfigError:
    other = _OTHER_NAMES.get(option, "")
    nearest = f"did you mean '{other}'? " if other in options else did_you_mean(option, options)
    own = " A class of your own: task._target_=MODULE.CLASS." if group == "task" else ""
    return ConfigError(where, option, "there is no such option.", f"{nearest}Allowed: {', '.join(options)}.{own}")


def _explain(error: Exception, arguments: Sequence[str]) -> ConfigError:
    """Return the message for Hydra's or OmegaConf's error about a key, a value, or the content of a file."""
    known, text = known_keys(), str(error)
    explained = _explain_composition(text, arguments, known) or _explain_override(text, arguments, known)
    if explained is not None:
        return explained
    own_groups = _own_groups(arguments)
    for argument in arguments:
        if "=" not in argument:
            continue
        key, _, value = argument.partition("=")
        key = key.lstrip("+~")
        if not key:
            return ConfigError(argument, None, "has no key.", "Write key=value, such as train.steps=100.")
        options = [*option_files(key)]
        if options and (value == "null" or re.match(r"[\d.-]|$", value)):
            # null and numbers are not option names; Hydra's own message is less clear
            return _unknown_option(key, value, options, key)
        if key in own_groups:
            if "No match in the defaults list" in text:
                return ConfigError(
                    key, value, "this group is not in the defaults list.", f"Add it with a plus sign: +{key}={value}"
                )
        elif key not in known and key.split(".")[0] not in _FREE and "@" not in key and "/" not in key:
            return ConfigError(key, value, "there is no such key.", _remedy(key, known))
    # Hydra's errors have OmegaConf's as their cause; under a debugger, OmegaConf's have causes without a key
    cause = error if hasattr(error, "full_key") or error.__cause__ is None else error.__cause__
    full_key: str | None = getattr(cause, "full_key", None) or None
    key = full_key and full_key.partition("[")[0]  # the list's key for an element of a list
    lines = str(getattr(cause, "msg", None) or cause).splitlines()
    merging = re.match(r"Error merging override ([^=]+)=", text)
    if merging is not None and (not key or key.isdigit()):  # an element of a list, which OmegaConf names by its index
        key = merging[1].lstrip("+")
    if key and key.startswith("cluster.sbatch"):
        return ConfigError("cluster.sbatch", None, "is a mapping.", "Write cluster.sbatch.OPTION=VALUE.")
    if key and key not in known and not key.startswith(("task", "hydra")):
        return ConfigError(_source(key, arguments), None, "there is no such key.", _remedy(key, known))
    if key and "is not a subclass of" in lines[0]:
        keys = [name for name in known if name.startswith(f"{key}.")]
        value = next((word.partition("=")[2] for word in arguments if word.startswith(f"{key}=")), "")
        kinds: dict[str, Any] = typing.get_type_hints(group_kinds().get(key, Config))
        meant = [f"{key}.{name}" for name, kind in kinds.items() if value in getattr(kind, "__members__", ())]
        remedy = f"Write {meant[0]}={value}." if meant else f"Keys: {', '.join(keys)}."
        return ConfigError(key, None, "is a group of keys, not a key.", remedy)
    if key:
        return ConfigError(_source(key, arguments), None, _plain(lines[0], key))
    return ConfigError("config", None, " ".join(line.strip() for line in text.splitlines() if line.strip()))


def _explain_override(text: str, arguments: Sequence[str], known: Sequence[str]) -> ConfigError | None:
    """Return the message for an override that Hydra cannot apply as it is written; None for any other error."""
    if match := re.match(r"Ambiguous value for argument '([^=]+)=(.*)'\n", text):
        key, value = match[1].lstrip("+"), match[2]
        forms = f" For a list write {key}=[{value}]; for one text, quote it for Hydra too: '{key}=\"{value}\"'."
        return ConfigError(
            key, value, "is several values.", f"To run each of them, add -m.{forms if '.' in key else ''}"
        )
    if match := re.match(r"Multiple values for ([^ ]+)\. To override a value use 'override [^ ]+: ([^ ]+)'", text):
        return ConfigError(match[1], match[2], "is chosen besides another option.", f"For several: +{match[1]}=[A,B].")
    if match := re.match(r"(?:Could not delete from config\. '|Error merging override ~)([^' =]+)", text):
        key = match[1]
        if key not in known:
            return ConfigError(f"~{key}", None, "there is no such key.", _remedy(key, known))
        return ConfigError(f"~{key}", None, "a key cannot be removed.", f"Give it another value: {key}=VALUE.")
    match = re.match(r"In '([^']+)': Could not override '([^']+)'\. No match in the defaults list", text)
    file = None if match is None else _file(match[1], arguments)
    if match is not None and file is not None:
        group = match[2]
        return ConfigError(
            f"{_near(file)}{_at_line(file, group)}: {group}", None, "there is no such group to override.",
            _nearest(group, [name for name in known if "." not in name]),
        )  # fmt: skip
    return None


def _explain_composition(text: str, arguments: Sequence[str], known: Sequence[str]) -> ConfigError | None:
    """Return the message for a Hydra error about the content of a file; None if it is not about one.

    Args:
        text: Hydra's message, such as "In 'experiment/bad': ConfigKeyError raised while composing config: ...".
        known: every key that may be set.
    """
    match = re.match(r"In '([^']+)': \w+ raised while composing config:\n(.*)", text)
    file = None if match is None else _file(match[1], arguments)
    if match is None or file is None:
        return None
    key = (re.search(r"full_key: *(\S*)", text) or ["", ""])[1].partition("[")[0]
    group = match[1].rpartition("/")[0]
    content = _content(file)
    if "is not a subclass of" in match[2]:  # a value in place of a group of keys; OmegaConf does not name the key
        key = next((name for name, value in content.items() if name in known and not isinstance(value, dict)), "")
        if key and f"{content[key]}" in option_files(key):
            return ConfigError(
                _where(file, key), None, "is a group, whose option a file chooses in its defaults.",
                f"In place of this line:\n    defaults:\n      - override /{key}: {content[key]}\n      - _self_",
            )  # fmt: skip
        return ConfigError(
            _where(file, key), None, "must have keys of its own.", f"Write {key or 'GROUP'}: {{KEY: VALUE}}."
        )
    if key == group and not content:
        return ConfigError(
            _where(file, ""), None, "has no keys.",
            "Write `# @package _global_` as its first line, and below it GROUP: {KEY: VALUE}.",
        )  # fmt: skip
    if key == group or (key.startswith(f"{group.replace('/', '.')}.") and group.split("/")[0] not in known):
        return ConfigError(
            _where(file, ""), None, f"its keys became those of a group {group!r}, which does not exist.",
            "Make its first line `# @package _global_`, so that they are keys of the whole configuration.",
        )  # fmt: skip
    if re.match(r"Key '.*' not in", match[2]):
        parent, _, leaf = key.rpartition(".")
        if key in known:  # YAML takes the dot as part of the name
            return ConfigError(
                _where(file, key), None, "a name with a dot is not a key in a file.",
                f"Write {parent}: {{{leaf}: VALUE}}.",
            )  # fmt: skip
        return ConfigError(_where(file, key), None, "there is no such key.", _remedy(key, known))
    return ConfigError(_where(file, key), None, _plain(match[2], key))


def _plain(text: str, key: str) -> str:
    """Return OmegaConf's message about the value of ``key`` without its types.

    Such a message is "Value 'x' of type 'str' could not be converted to Integer".
    """
    descriptions = {
        "Integer": "a whole number", "int": "whole numbers", "Float": "a number", "bool": "true or false",
        "String": "a text", "int, str": "a whole number", "str, int": "a whole number",
    }  # fmt: skip
    for pattern in (
        r"Value ('.*?') (?:of type '.*' )?(?:could not be converted to|is not a valid) (\w+).*",
        r"Value ('.*?') \(\w+\) is incompatible with type hint '(\w+)'.*",
        r"Value ('.*?') of type '\w+' is incompatible with type hint '(?:Optional\[)?Union\[(int, str|str, int)\]\]?'",
    ):
        if match := re.fullmatch(pattern, text):
            return f"must be {descriptions.get(match[2], match[2])}, not {match[1]}."
    for pattern, message in (
        (r"Invalid value ('.*'), expected one of \[(.*)\]", r"must be one of \2, not \1."),
        (r"Interpolation key '(.*)' not found", r"refers to a key that does not exist: ${\1}."),
        (r".*Environment variable '(.*)' not found.*", r"refers to an environment variable that is not set: \1."),
        (r"Unsupported interpolation type (.*)", r"refers to a resolver that does not exist: ${\1:...}."),
        (r"Recursive interpolation detected", r"refers to itself."),
        (r"no viable alternative at input '(.*)'", r"cannot be read from here on: \1. Close every bracket and quote."),
        (r"Key '.*' (?:is )?not in '.*'", r"there is no such key."),
        (r".*is not Optional.*", r"null has no meaning here: give a value, or leave the key out."),
    ):
        if match := re.fullmatch(pattern, text):
            return match.expand(message)
    if re.search(r"is not a ListConfig|with ListConfig|'typing\.List|to Dict\[", text):
        return f"must be a list{(key in known_keys() and facts_by_key()[key].form) or ': [...]'}."
    return f"{text}."


def _nearest(key: str, known: Sequence[str]) -> str:
    """Return the likely meaning of an unknown key, or the keys of its group."""
    group, _, leaf = key.rpartition(".")
    if group in known:
        leaves = [name.rpartition(".")[2] for name in known if name.startswith(f"{group}.")]
        likely = did_you_mean(leaf, leaves, f"{group}.") or f"Keys: {', '.join(f'{group}.{name}' for name in leaves)}."
        return likely.rstrip()
    return did_you_mean(key, known).strip() or f"Groups: {', '.join(name for name in known if '.' not in name)}."


def _source(key: str, arguments: Sequence[str]) -> str:
    """Return ``key`` with file and line if a file that the command line chooses sets it, else only ``key``."""
    chosen = [argument.lstrip("+").partition("=") for argument in arguments]
    if key not in [name for name, _, _ in chosen]:
        for group, _, option in chosen:
            file = _file(f"{group}/{option}", arguments)
            if file is not None and _line(file, key):
                return _where(file, key)
    return key


def _chosen_in(group: str, option: str, arguments: Sequence[str]) -> str | None:
    """Return the place where a configuration file, not the command line, chooses ``option`` of ``group``."""
    words = {argument.lstrip("+") for argument in arguments}
    if f"{group}={option}" in words:
        return None
    for file in _own_files(arguments):
        if line := _at_line(file, group, option):
            return f"{_near(file)}{line}: {group}"
    return None


def _at_line(file: Path, group: str, option: str | None = None) -> str:
    """Return ", line N" of the entry of the defaults list that chooses ``option`` (default: any) of ``group``."""
    chosen = r".*" if option is None else rf"['\"]?{re.escape(option)}['\"]?\s*(#.*)?"
    pattern = re.compile(rf"\s*-\s*(override\s+)?/?{re.escape(group)}(@\S*)?\s*:\s*{chosen}")
    for number, line in enumerate(file.read_text(encoding="utf-8", errors="replace").splitlines(), 1):
        if pattern.fullmatch(line):
            return f", line {number}"
    return ""


def _own_files(arguments: Sequence[str]) -> Iterator[Path]:
    for place in directories(arguments):
        yield from sorted(place.rglob("*.yaml"))


def _file(name: str, arguments: Sequence[str]) -> Path | None:
    """Return the user's file of option ``name`` (GROUP/OPTION); None if it is not the user's."""
    files = [place / f"{name}.yaml" for place in directories(arguments)]
    return next((file for file in files if file.is_file()), None)


def _near(file: Path) -> str:
    """Return the path relative to the working directory if it is below that, else unchanged."""
    try:
        return str(file.resolve().relative_to(Path.cwd()))
    except ValueError:
        return str(file)


def _where(file: Path, key: str) -> str:
    line = _line(file, key)
    return f"{_near(file)}{f', line {line}' if line else ''}{f': {key}' if key else ''}"


def _content(file: Path) -> dict[str, Any]:
    import yaml

    content: Any = yaml.safe_load(file.read_text(encoding="utf-8"))
    return content if isinstance(content, dict) else {}  # pyright: ignore[reportUnknownVariableType]


def _line(file: Path, key: str) -> int | None:
    """Return the line of ``key``, found by its full name or by the suffix that remains within the file's package."""
    import yaml

    root: Any = cast("Any", yaml).compose(file.read_text(encoding="utf-8"))
    names = key.split(".") if key else []
    for candidate in (*(names[start:] for start in range(len(names))), [key]):
        line = _line_below(root, candidate)
        if line is not None:
            return line
    return None


def _line_below(node: Any, names: Sequence[str]) -> int | None:
    pairs: list[tuple[Any, Any]] = node.value if getattr(node, "id", "") == "mapping" else []
    for label, value in pairs:
        if label.value == names[0]:
            return label.start_mark.line + 1 if len(names) == 1 else _line_below(value, names[1:])
    return None
