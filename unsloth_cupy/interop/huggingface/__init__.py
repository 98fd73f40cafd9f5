"""Makes models of transformers compute with the library's ops: ``patch(model)``.

    report = patch(model)      replaces known parts that pass a trial on random numbers
    print(report)              which parts were replaced, and why others were not
    unpatch(model)             restores the model: its results have the same bits as before
    PatchCallback()            patches in Trainer(..., callbacks=[...])

Models are not recognized by name.  A part is replaced if its structure is known and a trial shows
that the op computes the same as the part; all other parts stay as they are.
"""

import typing

from ...core import names as _names
from ._patch import PARTS as PARTS
from ._patch import patch as patch
from ._patch import unpatch as unpatch
from ._report import Report as Report

if typing.TYPE_CHECKING:
    from ._callback import PatchCallback as PatchCallback

# on first access, as a callback of transformers imports peft, bitsandbytes and more
_names.publish(__name__, {"PatchCallback": "_callback"})
