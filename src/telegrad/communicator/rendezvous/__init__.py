"""How the processes of a job find each other: torch's store, Slurm, MPI, and the network between hosts."""
