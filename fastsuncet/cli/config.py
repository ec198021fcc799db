"""Explain a key of a config: meaning, default, allowed values.

Prints what a key of a config means, its default and what is allowed; or all keys of a section.
--json-schema prints the same for editors. With the YAML language server, a config that begins with
`# yaml-language-server: $schema=fastsuncet.json` is then checked and completed.

examples:
  fastsuncet config criterion
  fastsuncet config criterion.temperature
  fastsuncet config --json-schema > fastsuncet.json

exit codes: 0 done; 2 no such key
"""

import json

from fastsuncet.cli._parser import Options, Parser


def arguments(parser: Parser) -> None:
    parser.takes("key", "SECTION.KEY", "a key or a section (default: all sections)", nargs="?", default="")
    parser.flag("--json-schema", "print a JSON schema, from which editors complete")


def run(parser: Parser, options: Options) -> None:
    from fastsuncet.config.messages import describe, json_schema

    if options.json_schema:
        print(json.dumps(json_schema(), indent=2))
    else:
        print("\n".join(describe(options.key)))
