"""The one kind of error that a command shows without a traceback."""


class UserError(Exception):
    """Something the user can put right: the message is one line that says what was found and what to do."""
