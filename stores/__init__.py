"""Long-term state: namespaced JSON documents. The stores themselves are not built yet."""
