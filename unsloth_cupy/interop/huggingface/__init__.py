"""Models of transformers that compute with the library's ops: ``patch(model)``.

    report = patch(model)      takes over what it knows and has tried on random numbers
    print(report)              what was taken, what was left and why
    unpatch(model)             back to equal bits
    PatchCallback()            the same in Trainer(..., callbacks=[...])

No model is known by its name.  A part is taken over where its structure is known and a trial shows
that the op gives what the part gives; every other part stays as it is.
"""

from ._callback import PatchCallback as PatchCallback
from ._patch import PARTS as PARTS
from ._patch import patch as patch
from ._patch import unpatch as unpatch
from ._report import Report as Report
