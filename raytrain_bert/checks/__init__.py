"""What `doctor` looks at: this machine, the cluster's nodes, and a short run of the job itself."""
