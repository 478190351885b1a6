"""Warm starts: what a compile of a function came to is kept on disk, and the next process that
meets the same function, objects and machine takes it from there.

`frames.py` is asked by Dynamo before it compiles a frame. An entry (`entry.py`) holds the code that
runs in place of the frame's own, the sources and kinds of its guards, a print (`prints.py`) of each
value that they bind, and the programs of its graph (`graphs.py`). It is taken where all prints are
equal; Dynamo's builder then makes the guards of the objects of this process. Nothing that is read
is unpickled. What cannot be checked is not kept.
"""
