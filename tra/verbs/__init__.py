"""What the command can do, a function a verb: its arguments are the command's, its docstring is its help."""
