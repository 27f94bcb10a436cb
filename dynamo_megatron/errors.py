"""What is the user's to mend, told apart from what is the program's."""


class InputError(ValueError):
    """Something that the user gave (a file, a folder, a key, a function, a machine) is refused; the message says what,
    where and how to mend it. It is all that the user is shown, and a command that has not begun its work ends with exit
    code 2. Any other error comes with a traceback. Functions of the pure packages raise plain ValueError for a wrong
    argument."""
