"""What finds faults of the compiler: `plait.bisect` and `plait.reduce`.

How data runs between the files:

    script     a command's file           -> a function and its arguments
    recorded   function, arguments        -> `Recorded`: each graph as text, with what it was given
    search     a graph, compiled, watched -> `Wrong`: a value further from float64 than eager's, its
                                             kernel, and the `Piece` that computes it alone
    whole      a module                   -> a result or gradient that is wrong in no kernel
    pieces     a `Piece`                  -> the text of a script that shows it
    shrink     a piece that fails         -> the smallest that still does
    trial      scripts                    -> what becomes of each in a process of its own
    switches   what is right without what -> the smallest set of passes that makes it wrong

`bisect` runs record, search, shrink, switches; `reduce` runs record, shrink, trial. Below all of
them `evaluate` computes values of nodes by eager, in its dtypes and in float64, and `measure` is
the rule for what is wrong; `check` is what the scripts call.
"""
