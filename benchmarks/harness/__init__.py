"""What every measurement needs: tables, the machine it ran on, a service and a PostgreSQL of its own."""
