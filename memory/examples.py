"""The documented import path of public names in `memory/long_term/examples.py`."""

from perdure.memory.long_term.examples import ExampleSelector as ExampleSelector
