-- The row held nothing any more, so there is nothing to bring back.
SELECT 1;
