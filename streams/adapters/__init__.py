"""Model providers behind one shape: `stream(request)` yields StreamChunks, `complete()` folds them."""

from streams.adapters.base import Adapter, Completion, Message, Request, ToolSpec, complete

__all__ = ["Adapter", "Completion", "Message", "Request", "ToolSpec", "complete"]
