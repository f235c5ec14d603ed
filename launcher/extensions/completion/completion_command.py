"""`launch completion SHELL`: print a script by which bash, zsh or fish completes all of this."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping
from pathlib import Path

from launcher.cli import flags
from launcher.cli.names import Parser
from launcher.config.key_docs import class_keys, groups
from launcher.errors import EXIT_DONE

# how each shell calls _launch_candidates; a word that ends in = gets no space behind it
_ADAPTERS = {
    "bash": r"""
_launch() {
    local line=${COMP_LINE:0:COMP_POINT} word IFS=$'\n'
    local current=${line##*[[:space:]]} words=()
    IFS=$' \t\n' read -r -a words <<<"${line%"$current"}"
    # bash replaces only what follows the last = or :
    local cut=''
    case $current in *[=:]*) cut=${current%"${current##*[=:]}"} ;; esac
    COMPREPLY=()
    for word in $(_launch_candidates "${words[@]:1}" "$current"); do
        case $word in
            "$current"*=) COMPREPLY+=("${word#"$cut"}") && compopt -o nospace ;;
            "$current"*[[:space:]]*) COMPREPLY+=("$(printf %q "${word#"$cut"}")") ;;
            "$current"*) COMPREPLY+=("${word#"$cut"}") ;;
        esac
    done
}
complete -o default -F _launch launch
""",
    "zsh": r"""
_launch() {
    local -a found
    found=(${(f)"$(sh -c "$_launch_functions"'_launch_candidates "$@"' sh "${(@Q)words[2,CURRENT]}")"})
    local -i none=1
    compadd -S ' ' -- ${found:#*=} && none=0
    compadd -S '' -- ${(M)found:#*=} && none=0
    (( none )) && _files
}
compdef _launch launch
""",
    "fish": r"""
function __launch
    set -l words (commandline -opc) (commandline -ct)
    set -l found (sh -c "$__launch_functions"'_launch_candidates "$@"' sh $words[2..-1])
    if string match -q -- "$words[-1]*" $found
        printf '%s\n' $found
    else
        __fish_complete_path $words[-1]
    end
end
complete -c launch -f -a '(__launch)'
""",
}


def launch_completion(arguments: list[str]) -> int:
    parser = Parser(prog="launch completion", description="Print a script by which a shell completes `launch`.")
    parser.add_argument("shell", choices=sorted(_ADAPTERS))
    print(script(parser.parse_args(arguments).shell))
    return EXIT_DONE


def script(shell: str) -> str:
    """Return the script for a shell."""
    functions = f"{_generated()}\n{Path(__file__).with_name('completion.sh').read_text(encoding='utf-8')}"
    variable = {
        "bash": functions,
        "zsh": f"_launch_functions={shlex.quote(functions)}",
        "fish": f"set -g __launch_functions {_quoted_for_fish(functions)}",
    }
    return variable[shell] + _ADAPTERS[shell]


def _quoted_for_fish(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


def _generated() -> str:
    """Return the functions that completion.sh calls, in POSIX shell."""
    keys = [key for group in groups() for key in group.keys]
    names = [key.name for key in keys if not key.name.endswith(".ARGUMENT")]
    values = {f"{key.name}/*": key.options or key.values for key in keys}
    of_tasks: dict[str, list[str]] = {}
    for option, content in next(group.options for group in groups() if group.name == "task").items():
        own = class_keys("task", content["_target_"])
        of_tasks[option] = [key.name for key in own]
        values |= {f"{key.name}/{option}": key.values for key in own}
    return "\n".join(
        [
            _function("_launch_verbs", "", {}, flags()),
            _function("_launch_flags", "$1", flags()),
            _function("_launch_keys", "$1", of_tasks, [*names, "task._target_"]),
            _function("_launch_values", "$1/$2", values),
        ]
    )


def _function(name: str, case: str, words_of: Mapping[str, Iterable[str]], always: Iterable[str] = ()) -> str:
    """Return a shell function that prints words, one a line.

    Args:
        case: what decides on the words.
        words_of: words by patterns of ``case``.
        always: words that it prints in any case.
    """
    lines = [f"{name}() {{"]
    if always := [*always]:
        lines.append(f"    printf '%s\\n' {shlex.join(always)}")
    if words_of:
        lines.append(f"    case {case} in")
        lines += [f"        {each}) printf '%s\\n' {shlex.join(words)} ;;" for each, words in words_of.items() if words]
        lines.append("    esac")
    return "\n".join([*lines, "}"])
