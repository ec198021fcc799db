"""Print the completion script of bash or zsh.

It completes commands, options and their choices, names of shipped configs and keys of a config.

examples:
  source <(fastsuncet completion bash)
  fastsuncet completion zsh > ~/.fastsuncet  # and source it in ~/.zshrc

exit codes: 0 printed; 2 another shell
"""

from fastsuncet.cli import COMMANDS
from fastsuncet.cli._parser import Options, Parser

# What bash runs; zsh does through bashcompinit. A case is what is written before the word to complete. A key of a
# config ends with =, after which no space belongs.
SCRIPT = """\
_fastsuncet() {{
  local cur="${{COMP_WORDS[COMP_CWORD]}}" words
  case "${{COMP_WORDS[*]:1:COMP_CWORD-1}} " in
{cases}
    *) words="{commands}" ;;
  esac
  COMPREPLY=($(compgen -W "$words" -- "$cur"))
  [[ ${{#COMPREPLY[@]}} -ne 1 || ${{COMPREPLY[0]}} != *= ]] || compopt -o nospace 2>/dev/null
}}
complete -o default -F _fastsuncet fastsuncet
"""


def arguments(parser: Parser) -> None:
    parser.add_argument("shell", choices=("bash", "zsh"), help="print the script for this shell")


def run(parser: Parser, options: Options) -> None:
    print("autoload -U +X bashcompinit && bashcompinit\n" * (options.shell == "zsh") + script(), end="")


def script() -> str:
    """Return the script of bash, from the commands' own parsers and the config's schema."""
    from fastsuncet.config.schema import CONFIG
    from fastsuncet.config.shipped import shipped

    configs, keys = list(shipped()), [f"{key}=" for key in CONFIG.values]
    offered = {
        "words": configs + keys,
        "overrides": keys,
        "where": configs,
        "name": configs,
        "key": [*CONFIG.values],
    }
    cases: list[tuple[str, list[str]]] = []
    for name in COMMANDS:
        words = []
        for action in Parser(name)._actions:
            options = [word for word in action.option_strings if word[:2] == "--"]
            choices = list(action.choices or ())
            cases += [(f'"{name} "*"{option} "', choices) for option in options if choices]
            words += options or choices
            words += offered.get(action.dest, [])
        cases.append((f'"{name} "*', words))
    groups = {name.split()[0] for name in COMMANDS} - set(COMMANDS)
    for group in groups:
        cases.append((f'"{group} "*', [name.split()[1] for name in COMMANDS if name.startswith(f"{group} ")]))
    lines = [f'    {pattern}) words="{" ".join(words)}" ;;' for pattern, words in cases]
    commands = " ".join(dict.fromkeys(name.split()[0] for name in COMMANDS))
    return SCRIPT.format(cases="\n".join(lines), commands=commands)
