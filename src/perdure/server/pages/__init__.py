"""The server's HTML pages."""
