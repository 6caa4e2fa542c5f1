"""What people see: metrics now, the page later. Reads events; imported by composers alone."""
