"""Passes over wrapper programs, each a file and a pure function WrapperProgram -> WrapperProgram;
`pipelines.PROGRAM` is their list.

No pass may drop an assert, a launch or a call: `run_passes` checks that, and the program, after
each. All sizes may be symbolic. Decided before there are instructions is which buffer takes over
the memory of another and where each lies in the arena (`schedule/memory.py`, which has to look into
kernels; `wrapper/build.py` makes Reuse, Place and Arena of it). Passes that need more than the
program run beside these where they are wanted: `wrapper/checks.py`, `wrapper/watch.py` and
`wrapper/streams.py` before them, `wrapper/partition.py` after them.
"""
