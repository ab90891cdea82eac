"""One module a stack: what its configuration means; and which stack a checkpoint comes from."""
