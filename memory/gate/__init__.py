"""The gate in front of long-term memory: what is kept, quarantined or refused."""
