"""Shardwise inside other frameworks' training loops. The names that users import are in `shardwise.integrations`."""
