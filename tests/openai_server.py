"""The scripted chat model of the tests: the server of the notebooks."""

from notebooks.openai_server import PATIENCE, Answer, Failure, Held, OpenAIServer, Reply

__all__ = ["PATIENCE", "Answer", "Failure", "Held", "OpenAIServer", "Reply"]
