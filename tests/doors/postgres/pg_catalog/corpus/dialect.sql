-- Rules of the dialect that no client's query shows by itself.
--# dialect: 1
SELECT amname FROM pg_am WHERE oid BETWEEN 2 AND 500 ORDER BY 1
--# dialect: 2
SELECT relhasindex IS TRUE, relhasindex IS NOT FALSE, relhasindex IS UNKNOWN, relhasindex IS NOT UNKNOWN FROM pg_class ORDER BY oid LIMIT 5
--# dialect: 3
SELECT oid FROM pg_class WHERE relname = ANY (SELECT amname FROM pg_am)
--# dialect: 4
SELECT amname FROM pg_am WHERE oid <> ALL (SELECT relam FROM pg_class)
--# dialect: 5
SELECT amname FROM pg_am WHERE oid > ANY (ARRAY[400,500]) ORDER BY 1
--# dialect: 6
SELECT amname FROM pg_am WHERE oid > ALL (ARRAY[400,403]) ORDER BY 1
--# dialect: 7
SELECT amname FROM pg_am WHERE oid < SOME (ARRAY[400,403]) ORDER BY 1
--# dialect: 8
SELECT amname FROM pg_am WHERE amname ~ ANY (ARRAY['^h','^b']) ORDER BY 1
--# dialect: 9
SELECT amname FROM pg_am WHERE amname ~* ALL (ARRAY['^H','EAP']) ORDER BY 1
--# dialect: 10
SELECT amname FROM pg_am WHERE amname ILIKE ANY (ARRAY['H%','B%']) ORDER BY 1
--# dialect: 11
SELECT amname FROM pg_am WHERE amname NOT LIKE ALL (ARRAY['h%','b%']) ORDER BY 1
--# dialect: 12
SELECT amname FROM pg_am WHERE amname LIKE 'h_ap' ESCAPE '!'
--# dialect: 13
SELECT amname FROM pg_am WHERE amname NOT ILIKE 'H%' ORDER BY 1
--# dialect: 14
SELECT amname FROM pg_am WHERE amname OPERATOR(pg_catalog.!~) '^h' ORDER BY 1
--# dialect: 15
SELECT amname FROM pg_am WHERE amname OPERATOR(pg_catalog.~~) 'h%' ORDER BY 1
--# dialect: 16
SELECT amname FROM pg_am WHERE amname OPERATOR(pg_catalog.!~~*) 'H%' ORDER BY 1
--# dialect: 17
SELECT ARRAY[1,2] OPERATOR(pg_catalog.&&) ARRAY[2], pg_is_in_recovery()
--# dialect: 18
SELECT ARRAY[1,2] @> ARRAY[2], ARRAY[1] <@ ARRAY[1,2], pg_is_in_recovery()
--# dialect: 19
SELECT ARRAY[1,2] || 3, 0 || ARRAY[1,2], ARRAY[1] || ARRAY[2], pg_is_in_recovery()
--# dialect: 20
SELECT (ARRAY[1,2,3])[2], (ARRAY[1,2,3])[:2], (ARRAY[1,2,3])[2:], pg_is_in_recovery()
--# dialect: 21
SELECT '{"a":{"b":1}}'::json -> 'a' -> 'b', '{"a":1}'::json ->> 'a', pg_is_in_recovery()
--# dialect: 22
SELECT '[1,2]'::json -> 0, '[1,2]'::jsonb ->> 1, pg_is_in_recovery()
--# dialect: 23
SELECT 1.5, .5, 1e3, 1 + 1.5, -1, - 2.5, 7 / 2, 7 % 4, ~5, 1 << 3, pg_is_in_recovery()
--# dialect: 24
SELECT 1 = 1.0, 'a' || 1, 1 || 'a', true || 'x', pg_is_in_recovery()
--# dialect: 25
SELECT oid::regclass || 'x' FROM pg_class WHERE relname = 'pg_am'
--# dialect: 26
SELECT relname FROM pg_class WHERE oid IN ('pg_am'::regclass, 'pg_type'::regclass) ORDER BY 1
--# dialect: 27
SELECT relname FROM pg_class WHERE oid::regclass::text IN ('pg_am') ORDER BY 1
--# dialect: 28
SELECT relname FROM pg_class WHERE (relname, relkind) IN (('pg_am','r'),('x','y'))
--# dialect: 29
SELECT relname FROM pg_class WHERE relname IN (SELECT relname FROM pg_class WHERE relname = 'pg_am')
--# dialect: 30
SELECT CASE amname WHEN 'heap' THEN 1 END, CASE WHEN false THEN 1 ELSE 2.5 END FROM pg_am ORDER BY oid
--# dialect: 31
SELECT c.relname FROM pg_class c NATURAL JOIN (SELECT 'pg_am'::name AS relname) q
--# dialect: 32
SELECT amname FROM pg_am ORDER BY amname OFFSET 2
--# dialect: 33
SELECT amname FROM pg_am ORDER BY amname LIMIT 2 OFFSET 1
--# dialect: 34
SELECT amname FROM pg_am ORDER BY amname FETCH FIRST 2 ROWS ONLY
--# dialect: 35
SELECT amname FROM pg_am ORDER BY amname LIMIT ALL
--# dialect: 36
SELECT amname FROM pg_am ORDER BY amname LIMIT NULL
--# dialect: 37
SELECT amtype, count(*) FROM pg_am GROUP BY amtype HAVING count(*) > 1
--# dialect: 38
SELECT amtype AS k, count(*) FROM pg_am GROUP BY k ORDER BY k
--# dialect: 39
SELECT amtype, count(*) FROM pg_am GROUP BY 1 ORDER BY 2 DESC, 1
--# dialect: 40
SELECT amname FROM pg_am UNION SELECT 'x' ORDER BY 1
--# dialect: 41
SELECT amname FROM pg_am EXCEPT SELECT 'heap' ORDER BY amname
--# dialect: 42
(SELECT amname FROM pg_am) ORDER BY 1 LIMIT 1
--# dialect: 43
SELECT NULL UNION SELECT oid FROM pg_am ORDER BY 1
--# dialect: 44
SELECT t.* FROM pg_am t WHERE amname = 'heap'
--# dialect: 45
SELECT x.n FROM unnest(ARRAY[5,6]) WITH ORDINALITY AS x(v, n), pg_am WHERE amname = 'heap' ORDER BY 1
--# dialect: 46
SELECT * FROM unnest(ARRAY[1,2], ARRAY['a']) AS t(a,b), pg_am WHERE amname='heap' ORDER BY 1
--# dialect: 47
SELECT * FROM unnest(ARRAY[1,2], ARRAY['a']) WITH ORDINALITY AS t(a,b,o), pg_am WHERE amname='heap' ORDER BY 1
--# dialect: 48
SELECT * FROM pg_am, LATERAL unnest(ARRAY[1,2]) WITH ORDINALITY AS x(a,b) WHERE amname='heap' ORDER BY a
--# dialect: 49
SELECT * FROM pg_am JOIN LATERAL generate_series(1,2) AS g ON true WHERE amname='heap' ORDER BY g
--# dialect: 50
SELECT * FROM pg_am CROSS JOIN LATERAL pg_catalog.generate_series(1,2) WITH ORDINALITY AS g(a,b) WHERE amname='heap' ORDER BY a
--# dialect: 51
SELECT g FROM generate_series(1,3) g, pg_am WHERE amname = 'heap' ORDER BY g
--# dialect: 52
SELECT g.g + 1 FROM generate_series(1,3) g, pg_am WHERE amname = 'heap' ORDER BY 1
--# dialect: 53
SELECT x FROM current_database() x
--# dialect: 54
SELECT (information_schema._pg_expandarray(indkey)).n, (information_schema._pg_expandarray(indkey)).x FROM pg_index WHERE indrelid = 'orders'::regclass ORDER BY 1,2
--# dialect: 55
SELECT information_schema._pg_expandarray(indkey) FROM pg_index WHERE indrelid = 'orders'::regclass ORDER BY 1
--# dialect: 56
SELECT upper(unnest(ARRAY['a','b'])), pg_is_in_recovery()
--# dialect: 57
SELECT * FROM aclexplode('{=r/bench,reader=w*/bench}'::aclitem[])
--# dialect: 58
SELECT * FROM pg_get_keywords() ORDER BY 1 LIMIT 3
--# dialect: 59
SELECT * FROM pg_options_to_table(ARRAY['a=1','b'])
--# dialect: 60
SELECT * FROM pg_partition_tree('orders'::regclass)
--# dialect: 61
SELECT relid FROM pg_partition_ancestors('orders'::regclass)
--# dialect: 62
SELECT pg_listening_channels()
--# dialect: 63
SELECT bool_and(amtype='i'), bool_or(amtype='i'), every(amtype='i'), count(DISTINCT amtype), count(amname) FROM pg_am
--# dialect: 64
SELECT count(*) FILTER (WHERE amtype = 'i') FROM pg_am
--# dialect: 65
SELECT lag(amname) OVER (ORDER BY amname), lead(amname, 1) OVER (ORDER BY amname), rank() OVER (ORDER BY amtype), ntile(2) OVER (ORDER BY oid), first_value(oid) OVER (ORDER BY oid) FROM pg_am ORDER BY amname
--# dialect: 66
SELECT dense_rank() OVER (ORDER BY amtype), last_value(amname) OVER (ORDER BY oid ROWS BETWEEN 1 PRECEDING AND 1 FOLLOWING) FROM pg_am ORDER BY oid
--# dialect: 67
SELECT percent_rank() OVER (ORDER BY oid), cume_dist() OVER (ORDER BY oid), nth_value(amname, 2) OVER (ORDER BY oid) FROM pg_am
--# dialect: 68
SELECT substring(amname from 2), substring(amname for 2), substring(amname, 2, 1), substring(amname from '(.)p$'), substr(amname, 2) FROM pg_am ORDER BY oid LIMIT 1
--# dialect: 69
SELECT trim(amname), trim(leading 'h' from amname), trim(trailing 'p' from amname), btrim(amname,'hp'), ltrim(amname,'h'), rtrim(amname,'p'), trim(amname, 'h') FROM pg_am ORDER BY oid LIMIT 1
--# dialect: 70
SELECT position('a' in amname), strpos(amname,'a') FROM pg_am ORDER BY oid LIMIT 1
--# dialect: 71
SELECT abs(-1), ceil(1.5), ceiling(1.2), floor(1.5), round(1.5), trunc(1.7), sign(-2), sqrt(4), power(2,3), 2 ^ 3, mod(7,4), pg_is_in_recovery()
--# dialect: 72
SELECT greatest(1,2), least(1,NULL,2), greatest('a','b'), coalesce(NULL,'x'), coalesce('y'), nullif(1,1), pg_is_in_recovery()
--# dialect: 73
SELECT length('abc'), char_length('a'), character_length('ab'), octet_length('é'), upper('a'), lower('B'), reverse('ab'), initcap('ab cd'), pg_is_in_recovery()
--# dialect: 74
SELECT quote_ident('A b'), quote_literal('a''b'), quote_nullable(NULL), quote_literal(1), pg_is_in_recovery()
--# dialect: 75
SELECT regexp_replace('abab','a','x','g'), regexp_match('ab','(a)(b)'), regexp_split_to_array('a1b','\d'), regexp_like('ab','^a'), pg_is_in_recovery()
--# dialect: 76
SELECT regexp_matches('abab','(a)','g'), regexp_split_to_table('a1b','\d'), string_to_table('a,b',','), pg_is_in_recovery()
--# dialect: 77
SELECT array_length(ARRAY[1,2],1), array_upper(ARRAY[1,2],1), array_lower(ARRAY[1,2],1), cardinality(ARRAY[1,2]), array_position(ARRAY['a','b'],'b'), pg_is_in_recovery()
--# dialect: 78
SELECT array_append(ARRAY[1],2), array_prepend(0,ARRAY[1]), array_cat(ARRAY[1],ARRAY[2]), array_remove(ARRAY[1,2],1), array_to_string(ARRAY[1,NULL,2],','), array_to_string(ARRAY[1,NULL],',','*'), string_to_array('a,b',',','b'), pg_is_in_recovery()
--# dialect: 79
SELECT '1 2'::int2vector, '{t,f}'::bool[], '1.5'::numeric, '1.5'::float8, '2'::int8, 't'::bool, 'off'::bool, pg_is_in_recovery()
--# dialect: 80
SELECT 1::bool, 0::bool, 'yes'::text::bool, true::int, true::text, 1::text, 1.5::int, '7'::text::int, 3::float8, '2.5'::text::numeric, pg_is_in_recovery()
--# dialect: 81
SELECT '{pg_am,pg_type}'::regclass[], ARRAY['pg_am']::text[]::regclass[], pg_is_in_recovery()
--# dialect: 82
SELECT (1,'a') = (1,'a'), pg_is_in_recovery()
--# dialect: 83
SELECT exists(SELECT 1 FROM pg_am), not exists (SELECT 1 FROM pg_am)
--# dialect: 84
SELECT array(SELECT amname FROM pg_am ORDER BY 1), ARRAY(SELECT oid FROM pg_am ORDER BY 1)
--# dialect: 85
SELECT (SELECT amname FROM pg_am ORDER BY 1 LIMIT 1), (SELECT count(*) FROM pg_am)
--# dialect: 86
SELECT current_user::text AS u, current_schema(), current_schemas(false), current_database()
--# dialect: 87
SELECT pg_catalog.pg_am.amname FROM pg_catalog.pg_am ORDER BY 1 LIMIT 1
--# dialect: 88
SELECT pg_am.amname FROM pg_catalog.pg_am ORDER BY 1 LIMIT 1
--# dialect: 89
SELECT amname AS "Mixed", amname AS low FROM pg_am ORDER BY "Mixed" LIMIT 1
--# dialect: 90
WITH a AS (SELECT amname FROM pg_am), b(n) AS (SELECT amname FROM a) SELECT n FROM b ORDER BY n LIMIT 1
--# dialect: 91
WITH RECURSIVE t(n) AS (SELECT 1 UNION ALL SELECT n+1 FROM t WHERE n < 3) SELECT n, pg_is_in_recovery() FROM t
--# dialect: 92
WITH pg_am AS (SELECT 1 AS x) SELECT x, pg_is_in_recovery() FROM pg_am
--# dialect: 93
SELECT format_type(23,NULL), format_type(1043,14), format_type(1700,786438), format_type(1042,5), format_type(1042,NULL), format_type(0,NULL), format_type(999999,NULL), format_type(1184,3), format_type(1007,NULL), format_type(NULL,NULL)
--# dialect: 94
SELECT pg_get_viewdef('totals'::regclass), pg_get_viewdef('totals'), pg_get_indexdef('orders_by_customer'::regclass), pg_get_indexdef('orders_pkey'::regclass,2,true), pg_get_indexdef(1)
--# dialect: 95
SELECT pg_get_constraintdef(oid), pg_get_constraintdef(oid,true) FROM pg_constraint WHERE conname = 'orders_pkey'
--# dialect: 96
SELECT pg_get_function_arguments(oid), pg_get_function_identity_arguments(oid), pg_get_function_result(oid) FROM pg_proc WHERE proname IN ('aclexplode','pg_get_keywords','array_append','generate_series') ORDER BY oid
--# dialect: 97
SELECT 'public'::regnamespace, 'bench'::regrole, 'english'::regconfig, 'simple'::regdictionary, '"C"'::regcollation, 403::regclass, 0::regclass, '-'::regclass
--# dialect: 98
SELECT to_regclass('pg_am'), to_regclass('nope'), to_regtype('int'), to_regtype('text[]'), to_regproc('nope'), to_regnamespace('public'), to_regrole('bench'), to_regprocedure('abs(int4)')
--# dialect: 99
SELECT 'int4'::regtype, 'integer[]'::regtype, 'varchar(10)'::regtype, 'timestamp with time zone'::regtype, 'public.orders'::regtype, 'orders[]'::regtype, '"char"'::regtype
--# dialect: 100
SELECT pg_table_is_visible('orders'::regclass), pg_type_is_visible('int4'::regtype), pg_function_is_visible('array_append'::regproc), pg_operator_is_visible(96), pg_table_is_visible(1)
--# dialect: 101
SELECT pg_cancel_backend(1), pg_terminate_backend(1)
--# dialect: 102
SELECT pg_terminate_backend(NULL)
--# dialect: 103
SELECT DISTINCT amtype FROM pg_am ORDER BY amtype
--# dialect: 104
SELECT DISTINCT ON (amtype) amname FROM pg_am ORDER BY amtype, amname
--# dialect: 105
SELECT ALL amtype FROM pg_am ORDER BY amtype LIMIT 1
--# dialect: 106
TABLE pg_am
--# dialect: 107
SELECT amname COLLATE "C" FROM pg_am ORDER BY amname COLLATE "C" DESC NULLS FIRST LIMIT 1
--# dialect: 108
SELECT a.amname FROM pg_am a JOIN (pg_opclass o JOIN pg_type t ON t.oid = o.opcintype) ON o.opcmethod = a.oid WHERE t.typname = 'bool' ORDER BY 1
--# dialect: 109
SELECT a.amname FROM (pg_am a CROSS JOIN pg_language l) WHERE l.lanname = 'sql' ORDER BY 1
--# dialect: 110
SELECT a.amname FROM ((SELECT * FROM pg_am)) a ORDER BY 1 LIMIT 1
--# dialect: 111
SELECT amname FROM pg_am WHERE amname = 'heap' AND NOT (amtype = 'i') OR false
--# dialect: 112
SELECT amname, amname FROM pg_am WHERE oid = 2::oid AND 2 = oid AND oid = '2' AND '2' = oid
--# dialect: 113
SELECT reltuples, relpages::float8 / 2, reltuples::bigint FROM pg_class WHERE relname = 'orders'
--# dialect: 114
SELECT * FROM pg_settings WHERE name = 'search_path'
--# dialect: 115
SELECT * FROM information_schema.tables WHERE table_name = 'orders'
--# dialect: 116
SELECT table_name, column_name, data_type, numeric_precision, character_maximum_length, datetime_precision FROM information_schema.columns WHERE table_name IN ('orders','customers') ORDER BY 1, ordinal_position
--# dialect: 117
SELECT EXISTS(SELECT 1 FROM pg_am) AS "e", "exists" FROM (SELECT 1 AS "exists") q
--# dialect: 118
SELECT 1, 1 UNION SELECT 2, oid::int4 FROM pg_am ORDER BY 2 DESC LIMIT 2
--# dialect: 119
SELECT DISTINCT ON (amtype) amtype AS t, amname FROM pg_am ORDER BY 1, 2 DESC OFFSET 1
--# dialect: 120
SELECT DISTINCT ON (t) amtype AS t, amname FROM pg_am ORDER BY t, amname LIMIT 1
--# dialect: 121
SELECT DISTINCT ON (amtype) amname FROM pg_am ORDER BY amtype DESC NULLS LAST, amname
--# dialect: 122
SELECT DISTINCT ON (lower(amname)) count(*) OVER (), amname FROM pg_am ORDER BY lower(amname) LIMIT 2
--# dialect: 123
SELECT * FROM (VALUES (1,'a'),(2,NULL)) v, pg_am WHERE amname = 'heap' ORDER BY column1 DESC
--# dialect: 124
(SELECT amname FROM pg_am ORDER BY 1 LIMIT 1) UNION ALL (SELECT amname FROM pg_am ORDER BY 1 DESC LIMIT 1)
--# dialect: 125
SELECT relname FROM pg_class c WHERE EXISTS (SELECT 1 FROM pg_index i WHERE i.indrelid = c.oid AND i.indisunique) AND relnamespace = 'public'::regnamespace ORDER BY relname
--# dialect: 126
SELECT lag(amname, 1, 'x') OVER (ORDER BY oid) FROM pg_am ORDER BY oid LIMIT 1
--# dialect: 127
SELECT c.relname, l.n FROM pg_class c LEFT JOIN LATERAL (SELECT 1 AS n WHERE c.relname = 'x') l ON true WHERE c.relname = 'pg_am'
--# dialect: 128
SELECT c.relname, l.n FROM pg_class c LEFT JOIN LATERAL (SELECT 1 AS n) l ON c.relname = 'x' WHERE c.relname = 'pg_am'
--# dialect: 129
WITH t AS MATERIALIZED (SELECT 1 AS a) SELECT a, pg_is_in_recovery() FROM t
--# dialect: 130
SELECT amname FROM ONLY pg_am ORDER BY 1 LIMIT 1
--# dialect: 131
SELECT * FROM pg_am a JOIN pg_am b USING (oid) ORDER BY a.oid LIMIT 1
--# dialect: 132
SELECT string_agg(amname, ',' ORDER BY oid) FILTER (WHERE amtype = 'i') FROM pg_am
--# dialect: 133
SELECT array_agg(DISTINCT amtype ORDER BY amtype DESC) FROM pg_am
--# dialect: 134
SELECT amname FROM pg_am WHERE (SELECT count(*) FROM pg_am) > 3 AND amname = ANY('{heap,gin}'::name[]) ORDER BY 1
--# dialect: 135
SELECT CAST('5' AS int) + 1, '5'::int4 + '6', 2 - '1', '7' % 4, pg_is_in_recovery()
--# dialect: 136
SELECT amname FROM pg_am WHERE amname > 'h' COLLATE "C" ORDER BY 1
--# dialect: 137
SELECT NOT true, true AND NULL, false OR NULL, NULL IS NULL, 1 IS DISTINCT FROM NULL, pg_is_in_recovery()
--# dialect: 138
SELECT 'a' < 'B', 'a' LIKE 'A', 'a' ILIKE 'A', 'a_b' LIKE 'a\_b', 'axb' LIKE 'a\_b', pg_is_in_recovery()
--# dialect: 139
SELECT 'abc' ~ 'B', 'abc' ~* 'B', 'abc' !~ 'x', 'a.c' ~ 'a\.c', pg_is_in_recovery()
--# dialect: 140
SELECT DISTINCT amtype, count(*) OVER () FROM pg_am ORDER BY 1
--# dialect: 141
SELECT relname FROM pg_class WHERE relname LIKE 'pg\_am' ORDER BY relname
--# dialect: 142
SELECT max(relname) FROM pg_class WHERE relkind = 'i' HAVING count(*) > 100000
--# dialect: 143
SELECT nullif(relname, 'pg_am'), coalesce(nullif(relname, 'pg_am'), 'none') FROM pg_class WHERE relname = 'pg_am'
--# dialect: 144
SELECT amname, rank() OVER (PARTITION BY amtype ORDER BY amname DESC) FROM pg_am ORDER BY 2, 1 LIMIT 2
--# dialect: 145
SELECT first_value(amname) OVER (ORDER BY oid RANGE BETWEEN UNBOUNDED PRECEDING AND UNBOUNDED FOLLOWING) FROM pg_am LIMIT 1
--# dialect: 146
SELECT amname FROM pg_am NATURAL LEFT JOIN (SELECT 1 AS zz) q ORDER BY 1 LIMIT 1
--# dialect: 147
SELECT pg_get_userbyid(relowner), relacl::text, relacl::text[] FROM pg_class WHERE relname = 'orders'
--# dialect: 148
SELECT left('abc',2), right('abc',2), left('abc',-1), right('abc',-1), right('abc',0), lpad('a',3,'x'), rpad('a',3), lpad('abc',2), split_part('a,b',',',2), split_part('a,b',',',-1), pg_is_in_recovery()
--# dialect: 149
SELECT md5('a'), ascii('a'), chr(65), starts_with('abc','ab'), replace('abc','b','x'), pg_is_in_recovery()
--# dialect: 150
SELECT concat('a',NULL,1), concat_ws(',', 'a',NULL,'b'), concat_ws(NULL,'a'), format('%s %I %L %%', 'a','B b','c'), format('%2$s%1$s','a','b'), format('%L|%5s|%-3s|', NULL, 'a', 'b'), pg_is_in_recovery()
--# dialect: 151
SELECT pg_size_pretty(12345678::bigint), pg_encoding_to_char(6), pg_char_to_encoding('UTF8'), pg_char_to_encoding('nope'), parse_ident('a."B"'), pg_is_in_recovery()
--# dialect: 152
SELECT ARRAY[true]::text, pg_is_in_recovery()
--# dialect: 153
SELECT text(1), oid('99999'), int4('7'), int8(7), pg_is_in_recovery()
--# dialect: 154
SELECT 1 WHERE EXISTS ((SELECT 1 FROM pg_am))
--# dialect: 155
SELECT 'abc' ~ '***=a.c', 'a' || '{1}'::int[]::text, json_build_array(1,'a',NULL)::text, pg_is_in_recovery()
--# dialect: 156
SELECT x, y, z, pg_is_in_recovery() FROM (VALUES (1,'a'),(2,'b')) t(x,y) FULL JOIN (VALUES (2,'p'),(3,'q')) u(x,z) USING (x) ORDER BY x
--# dialect: 157
SELECT x, y, z, pg_is_in_recovery() FROM (VALUES (1,'a'),(2,'b')) t(x,y) RIGHT JOIN (VALUES (2,'p'),(3,'q')) u(x,z) USING (x) JOIN (VALUES (2)) v(x) USING (x) ORDER BY x
--# dialect: 158
SELECT ARRAY[]::int[], '{{1},{2}}'::int[], '{NULL,a}'::text[], 'abc'::"char", relname::"char" FROM pg_class WHERE relname = 'pg_am'
--# dialect: 159
SELECT col_description('orders'::regclass,4), col_description('orders'::regclass,0), obj_description('orders'::regclass,'pg_class'), has_table_privilege(1,'SELECT'), has_column_privilege('orders','id','SELECT')
--# dialect: 160
SELECT ('{"a":[1,2]}'::json -> 'a') -> 1, '{"a":[1,2]}'::json -> ('a' || ''), pg_is_in_recovery()
--# dialect: 161
SELECT array_upper(indkey, 1), array_lower(indkey, 1), indkey[0], indkey[1], conkey[1] FROM pg_index JOIN pg_constraint ON conindid = indexrelid WHERE indrelid = 'orders'::regclass
--# dialect: 162
SELECT generate_series(1, 3, 2), pg_is_in_recovery()
--# dialect: 163
SELECT relname FROM pg_class WHERE oid = 'pg_catalog.pg_am'::regclass AND relnamespace = 'pg_catalog'::regnamespace
--# dialect: 164
SELECT amname IN ('heap', NULL), amname NOT IN ('heap'), amtype IN ('t') FROM pg_am ORDER BY oid
--# dialect: 165
SELECT coalesce(relacl, '{}'), coalesce(reloptions::text, 'none') FROM pg_class WHERE relname = 'orders'
--# dialect: 166
SELECT array_to_string(ARRAY[[1,2],[3,4]], ','), array_to_string(ARRAY[true,NULL], ',', '?'), pg_is_in_recovery()
