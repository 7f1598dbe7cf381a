"""What a user runs on a cluster: the command ``telegrad`` and what its subcommands do."""
