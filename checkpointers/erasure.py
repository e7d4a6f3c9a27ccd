"""TEMP"""
from __future__ import annotations
from typing import Any
class Eraser:
    def __init__(self, *a: Any) -> None: ...
def check_ids(x: Any) -> Any: return x
