"""The engine of generation: rows that join and leave a batch between its steps."""

import typing

from ..core import names as _names

if typing.TYPE_CHECKING:
    from .engine import Engine as Engine
    from .requests import Event as Event
    from .requests import Request as Request
    from .requests import Sample as Sample

_HOMES = {"Engine": "engine", "Event": "requests", "Request": "requests", "Sample": "requests"}

_names.publish(__name__, _HOMES)
