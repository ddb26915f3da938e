"""Components of rows that are coded as differences: aligned rows of reference blocks are added."""
