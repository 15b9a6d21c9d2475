"""CONFIG.toml of `shardwise train`. No torch here."""
