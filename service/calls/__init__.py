"""A call from what is asked to what is answered: values, limits, generations, errors; the leaf."""
