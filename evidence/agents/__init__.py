"""What the server and the agents on the nodes say to each other."""
