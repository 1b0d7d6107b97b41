"""Stand-ins at our own interfaces: real HTTP and sockets, no model and no database."""
