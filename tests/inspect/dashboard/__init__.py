"""The dashboard: its API in process, its command, its page in a browser."""
