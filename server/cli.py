"""The command `octavo`: reads the flags, runs a subcommand, turns configuration mistakes into one line and exit code 2.

Runs in the main thread. Imports nothing heavy, so that `--help` and mistakes answer at once: what serves a model is
imported by the subcommand that needs it.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence

from config.errors import ConfigError
from config.flags import Parser, add_settings, refuse_unknown
from config.settings import Settings
from config.version import VERSION
from models.errors import ModelError
from scheduler.errors import SchedulerError
from server import cache_command, evaluate, keys_command, profile, replay

_EPILOG = (
    "Every flag has an environment twin (--max-model-len: OCTAVO_MAX_MODEL_LEN) and a key in the YAML file given by "
    "--config (max-model-len). A flag wins over the environment, the environment over the file."
)

_WITHOUT_SETTINGS = {"eval": evaluate.run, "cache": cache_command.run, "replay": replay.run, "keys": keys_command.run}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; the exit code: 0 when it ended well, 1 when it could not go on, 2 for a mistake of whoever
    started it."""
    began = time.perf_counter()
    parser = _parser()
    try:
        namespace, unknown = parser.parse_known_args(arguments)
        if namespace.command == "loadtest":
            # A client like any other: it shares no process with a server, and no source.
            os.execv(sys.executable, [sys.executable, "-m", "loadtest.bench", *unknown])
        if (command := _WITHOUT_SETTINGS.get(namespace.command)) is not None:
            if unknown:
                hint = f"`octavo {namespace.command} --help` lists the flags"
                parser.error(f"unexpected argument {unknown[0]!r}: {hint}")
            code = command(namespace)
            sys.stdout.flush()  # here a pipe that nobody reads is no traceback
            return code
        refuse_unknown(unknown)
        flags = vars(namespace)
        if flags.pop("command") == "profile":
            sets = flags.pop("sets")
            return profile.run(Settings.load(flags, os.environ), sets, began)
        settings = Settings.load(flags, os.environ)
        from server.launch import serve

        return serve(settings, began)
    except (ConfigError, ModelError) as error:
        print(f"octavo: error: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # whoever read what is printed has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except SchedulerError as error:
        print(f"octavo: error: the model cannot run: {error}", file=sys.stderr)
        return 1


def _parser() -> Parser:
    parser = Parser(prog="octavo", description="Serve language models over the OpenAI HTTP API.")
    parser.add_argument("--version", action="version", version=f"octavo {VERSION}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True, parser_class=Parser)
    serve = commands.add_parser(
        "serve", help="serve a model", description="Serve a model until interrupted.", epilog=_EPILOG
    )
    add_settings(serve)
    evaluation = commands.add_parser(
        "eval",
        help="measure what the weights formats cost in accuracy",
        description="Compare each weights format with float32 on plain English; exit code 1 when a limit is missed.",
    )
    evaluate.add_arguments(evaluation)
    cache = commands.add_parser(
        "cache",
        help="save, load, empty or show a running daemon's prefix cache",
        description="Ask a running daemon, with its admin key.",
    )
    cache_command.add_arguments(cache)
    keys = commands.add_parser(
        "keys", help="make API keys and list whose there are", description="Look after the file of --api-key-file."
    )
    keys_command.add_arguments(keys)
    replaying = commands.add_parser(
        "replay",
        help="repeat a recorded run's decisions, without its model",
        description="Take every admission, preemption and eviction of a recording again and compare; 1 if one differs.",
    )
    replay.add_arguments(replaying)
    commands.add_parser("loadtest", add_help=False, help="drive request sets at any server of this API and report")
    profiling = commands.add_parser(
        "profile",
        help="show where the time of a step goes",
        description="Serve a standard request set in one process with its client beside it, then show where time went.",
        epilog=_EPILOG,
    )
    profile.add_arguments(profiling)
    add_settings(profiling)
    return parser


if __name__ == "__main__":
    sys.exit(main())
