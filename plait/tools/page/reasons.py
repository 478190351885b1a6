"""What the scheduler's reasons against fusion mean, for people who do not know the scheduler.

In: a reason of `schedule/`. Out: a sentence or two: why the two stay apart, and what of it is the
user's to change, if anything is.
"""

from __future__ import annotations

import re

_MEANINGS: tuple[tuple[str, str], ...] = (
    (
        r"must run between them$",
        "What stands between needs a result of the first, and the second needs what it makes. "
        "Calls of PyTorch's own operators are such borders.",
    ),
    (
        r"^spaces .* cannot be made one$",
        "Their loops go over different points, of which none is made of the other by splitting or "
        "joining axes: a kernel would compute one of the two several times.",
    ),
    (
        r" is stored at .*, loaded at ",
        "The second reads elements that the first makes at other points of the loops: they are "
        "there only once the first has run. A transposed, shifted or gathered read does that.",
    ),
    (
        r"is made in the reduced range and needed outside of it$",
        "One is there for each point that a sum runs over, the other runs once a row: the row "
        "would have to be kept.",
    ),
    (r"^they run on different devices$", "A kernel runs on one device."),
    (
        r"^a reduction would read a window a point$",
        "Each point would compute a whole window (of a pooling, say) again for every neighbour "
        "that reads it.",
    ),
    (r"^an axis is empty$", "One of the two has nothing to do."),
    (
        r"points would run over .* outer points$",
        "A reduction of so few rows keeps few cores busy; the other has work for all of them.",
    ),
    (
        r"^a running reduction needs one axis$",
        "A scan or running sum goes along one axis, and the other has several there.",
    ),
    (
        r"^the order of the reduced axes matters$",
        "One of the two goes through its rows in a fixed order, the other's loops have another.",
    ),
    (
        r"is known once all rows are$",
        "The value is added up by all programs together: it is there once all of them have ended.",
    ),
    (
        r"is written in pieces or updated in place$",
        "The other would see memory that is half written.",
    ),
    (r"^both write ", "Which of the two values stays would be left to chance."),
    (
        r"^the option without keeps it from that$",
        "The option without lets a pass take so many decisions, and no more: plait.bisect tries "
        "which of them gives a wrong number.",
    ),
    (
        r"would be walked as another asks|a sum walks the axes that it has$",
        "Under batch_invariant the order of a sum follows from what it reads alone, not from what "
        "else its kernel computes.",
    ),
    (
        r"^would read .* buffers, limit",
        "A kernel that reads more streams at once is slower than two kernels. The option "
        "max_fusion_reads sets the limit.",
    ),
    (
        r"^would write .* buffers, limit",
        "A kernel that writes more streams at once is slower than two kernels.",
    ),
    (
        r"^would hold .* operations, limit",
        "A larger kernel takes long to compile and runs out of registers.",
    ),
    (r"^sums run over different rows$", "Their sums of columns go through other rows."),
    (
        r"^rows do not lie along memory$",
        "A kernel that sums columns on its way goes through rows as they lie in memory, and these "
        "do not.",
    ),
    (r"^no launch is near$", "About a shared launch: no other small kernel stands near this one."),
    (r"^a launch holds .* parts$", "About a shared launch: it is full."),
    (
        r"^one needs the other, or what runs between them$",
        "About a shared launch, whose parts run side by side: these two have an order.",
    ),
    (
        r"bytes would leave the cache$",
        "About a shared launch: what one of the two reads is still in the cache where it stands, "
        "and would not be where the other stands.",
    ),
    (
        r"bytes would be alive at once",
        "About a shared launch: the program would need more memory at its peak.",
    ),
)


def meaning(reason: str) -> str:
    """What a reason means; "" for one that is not known."""
    return next((text for pattern, text in _MEANINGS if re.search(pattern, reason)), "")
