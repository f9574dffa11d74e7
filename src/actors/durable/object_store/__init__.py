"""Access to buckets and folders: URLs, calls and errors of object stores, and file modes."""
