"""``qmargin completion``: shell completion of commands, options and their values."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from qmargin.cli.options import Command, Parser, argument, commands_of, option

_SCRIPTS = {  # each calls this program, so that it completes for the installed version
    "bash": r"""_qmargin() {
    local IFS=$'\n'
    COMPREPLY=($(qmargin completion bash --words "${COMP_WORDS[@]:1:COMP_CWORD}" 2>/dev/null))
}
complete -o default -F _qmargin qmargin
""",
    "zsh": r"""#compdef qmargin
_qmargin() {
    local -a found
    found=("${(@f)$(qmargin completion zsh --words "${(@)words[2,CURRENT]}" 2>/dev/null)}")
    if [[ -n "${found[1]}" ]]; then compadd -a found; else _files; fi
}
if [[ "${funcstack[1]}" == _qmargin ]]; then _qmargin "$@"; else compdef _qmargin qmargin; fi
""",
    "fish": r"""function __qmargin
    set -l words (commandline -opc) (commandline -ct)
    qmargin completion fish --words $words[2..-1] 2>/dev/null
end
complete -c qmargin -a '(__qmargin)'
""",
}
_HOW = """usage; to have it in every new shell, add the line to its start file:
  bash  eval "$(qmargin completion bash)"
  zsh   eval "$(qmargin completion zsh)", after compinit
  fish  qmargin completion fish | source
"""


@dataclass(frozen=True, kw_only=True)
class Completion(Command):
    """Write a script that completes commands, options and their values in a shell."""

    epilog: ClassVar[str] = _HOW

    shell: Literal["bash", "zsh", "fish"] = argument("shell to write the script for")
    words: tuple[str, ...] | None = option(argparse.SUPPRESS, nargs=argparse.REMAINDER)

    def run(self) -> None:
        if self.words is None:
            sys.stdout.write(_SCRIPTS[self.shell])
            return
        from qmargin.cli.commands import build_parser

        found = candidates(build_parser(), self.words)
        sys.stdout.write("".join(f"{name}\n" for name in found))


def candidates(parser: argparse.ArgumentParser, words: Sequence[str]) -> list[str]:
    """Completions of the last word; none where a file or a number is expected."""
    *before, current = words or [""]
    last = ""
    for word in before:
        parser = commands_of(parser).get(word, parser) if not last.startswith("-") else parser
        last = word
    if isinstance(parser, Parser):
        parser.load_extensions()
    option = parser._option_string_actions.get(last)
    if option is not None and option.nargs != 0:
        known = option.choices or ()
    elif current.startswith("-"):
        hidden = argparse.SUPPRESS
        actions = parser._option_string_actions.items()
        known = [name for name, action in actions if action.help != hidden]
    else:
        places = [action for action in parser._actions if not action.option_strings]
        known = [name for action in places for name in action.choices or ()]
    return [str(name) for name in known if str(name).startswith(current)]
