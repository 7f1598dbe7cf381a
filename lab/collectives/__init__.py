"""All collectives in virtual time: every operation, the critical path of one, its timeline, and bytes by link."""
