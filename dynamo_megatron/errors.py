"""The errors that the user can fix, as opposed to errors of the program."""


class InputError(ValueError):
    """Something that the user provided (a file, a folder, a key, a function, a machine) is refused. The message says
    what, where and how to fix it. The user is shown nothing else, and a command that has not begun its work ends with
    exit code 2. Any other error is shown with a traceback. Functions of the pure packages raise plain ValueError for a
    wrong argument."""


class StatedError(RuntimeError):
    """Of a run under way: the user is shown the message, which says it all, without a traceback."""


class ConfigError(InputError):
    """A configuration that is refused; the message has a line for each fault."""
