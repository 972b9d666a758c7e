"""`kvalet doctor`: says whether this machine can run Kvalet, what is missing and how to get it."""
