"""The wrapper IR: a program as a typed list of instructions, and the targets that run or print
it."""
