"""`fastsuncet completion`: the completion of bash and zsh, from the commands' own parsers and the config's schema."""

import argparse
from collections.abc import Mapping

from fastsuncet.config.reader import shipped
from fastsuncet.config.schema import CONFIG

# What bash runs; zsh does through bashcompinit. A key of a config ends with =, after which no space belongs.
SCRIPT = """\
_fastsuncet() {{
  local cur="${{COMP_WORDS[COMP_CWORD]}}" words
  case "${{COMP_WORDS[*]:1}}" in
{cases}
    *) words="{commands}" ;;
  esac
  COMPREPLY=($(compgen -W "$words" -- "$cur"))
  [[ ${{#COMPREPLY[@]}} -ne 1 || ${{COMPREPLY[0]}} != *= ]] || compopt -o nospace 2>/dev/null
}}
complete -o default -F _fastsuncet fastsuncet
"""


def completion(shell: str, parsers: Mapping[str, argparse.ArgumentParser]) -> str:
    """Return the script for "bash" or "zsh"; `parsers` are those of the commands, by name."""
    configs = [*shipped(), *(f"{key}=" for key in CONFIG.values)]
    cases = []
    for name, parser in parsers.items():
        words = [
            option for action in parser._actions for option in action.option_strings if option[:2] == "--"
        ]
        takes_config = any(action.dest in ("words", "overrides") for action in parser._actions)
        cases.append(f'    "{name} "*) words="{" ".join([*words, *(configs if takes_config else [])])}" ;;')
    head = "autoload -U +X bashcompinit && bashcompinit\n" if shell == "zsh" else ""
    firsts = dict.fromkeys(name.split()[0] for name in parsers)
    groups = [
        f'    "{first} "*) words="{" ".join(n.split()[1] for n in parsers if n.startswith(first + " "))}" ;;'
        for first in firsts
        if first not in parsers
    ]
    return head + SCRIPT.format(cases="\n".join([*cases, *groups]), commands=" ".join(firsts))
