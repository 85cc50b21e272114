# The paper, from the tables and figures above.
