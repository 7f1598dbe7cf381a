"""What a job would take on a cluster, and which options are worth it: the model behind ``telegrad advise``."""
