"""HTTP requests: the application, users and permissions, limits, replies and logs."""
