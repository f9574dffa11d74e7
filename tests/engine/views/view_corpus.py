"""Queries that resolve to relational trees, and queries that do not, over small tables.

`PORTABLE` runs on the SQLite oracle too; `SPARK_ONLY` needs Spark's syntax or functions;
`UNSUPPORTED` names the construct that the reason must name.
"""

from __future__ import annotations

from typing import Final

from actors.model.plan.schema import TableColumn, TableSchema

TABLES: Final = {
    "a": TableSchema(
        (TableColumn("k", "int"), TableColumn("g", "string"), TableColumn("v", "int"))
    ),
    "b": TableSchema(
        (TableColumn("k", "int"), TableColumn("c", "int"), TableColumn("w", "bigint"))
    ),
    "c": TableSchema((TableColumn("c", "int"), TableColumn("name", "string"))),
    "e": TableSchema((TableColumn("id", "int"), TableColumn("s", "struct<x:int,y:string>"))),
    "d": TableSchema(
        (
            TableColumn("id", "int", False),
            TableColumn("x", "int", False),
            TableColumn("t", "string"),
        )
    ),
}

_JOINS: Final = {
    "inner_on": "select a.g, b.w from a join b on a.k = b.k where a.v > 0 and b.w + 1 > a.v",
    "comma": "select a.v, c.name from a, b, c where a.k = b.k and b.c = c.c and a.v < b.w",
    "expression_key": "select a.k, b.w from a join b on a.k + 1 = b.k * 2 and upper(a.g) = 'X'",
    "null_safe": "select a.k, b.w from a join b on a.k <=> b.k",
    "theta": "select a.k, c.c from a join c on a.k < c.c",
    "product": "select a.k, c.c from a cross join c where a.v > 0",
    "self": "select l.v, r.v as rv from a l join a r on l.k = r.k and l.g = r.g",
    "three_times": "select x.k, z.w from b x join b y on x.c = y.k join b z on y.c = z.k",
    "using": "select k, a.v, b.w from a join b using (k)",
    "using_chain": "select k, a.v, x.w, y.w as yw from a join b x using (k) join b y using (k)",
    "using_left": "select k, b.k as bk, w from a left join b using (k)",
    "using_right": "select k, a.k as ak, b.k as bk, w from a right join b using (k)",
    "using_full": "select k, a.k as ak, b.k as bk, v, w from a full join b using (k)",
    "using_full_chain": "select k, a.v, x.w, y.w as yw from a full join b x using (k) "
    "full join b y using (k)",
    "left": "select a.k, a.g, b.w from a left join b on a.k = b.k",
    "left_residual": "select a.k, b.w from a left join b on a.k = b.k and b.w > a.v",
    "left_on_left": "select a.k, a.v, b.w from a left join b on a.k = b.k and a.v > 0",
    "left_on_right": "select a.k, b.w from a left join b on a.k = b.k and b.w > 0",
    "left_where_left": "select a.k, b.w from a left join b on a.k = b.k where a.v > 0",
    "left_where_right": "select a.k, b.w from a left join b on a.k = b.k where b.w > 0",
    "left_where_missing": "select a.k from a left join b on a.k = b.k where b.k is null",
    "left_where_both": "select a.k, b.c from a left join b on a.k = b.k where a.v < b.w or a.v = 1",
    "left_theta": "select a.k, b.w from a left join b on a.k < b.k",
    "left_true": "select a.k, b.w from a left join b on true",
    "left_never": "select a.k, b.w from a left join b on 1 = 0",
    "left_chain": "select a.k, b.w, c.name from a left join b on a.k = b.k left join c on b.c = "
    "c.c",
    "left_then_inner": "select a.k, b.w, c.name from a left join b on a.k = b.k "
    "join c on b.c = c.c where a.v is not null",
    "inner_then_left": "select a.v, b.w, c.name from a join b on a.k = b.k "
    "left join c on b.c = c.c where a.v < b.w",
    "left_of_constant": "select a.k, q.one, q.w1 from a left join "
    "(select k, 1 as one, coalesce(w, 7) as w1 from b) q on a.k = q.k",
    "left_of_filtered": "select q.k, q.v1, b.w from (select k, v + 1 as v1 from a where v > 0) q "
    "left join b on q.k = b.k and q.v1 > 1",
    "left_of_inner": "select a.k, q.w, q.name from a left join "
    "(select b.k, b.w, c.name from b join c on b.c = c.c where c.name = 'p') q on a.k = q.k",
    "left_comma": "select a.v, b.w, c.name from a, b left join c on b.c = c.c where a.k = b.k",
    "right": "select a.g, b.w from a right join b on a.k = b.k and a.v > 0",
    "right_of_right": "select a.g, b.w, c.name from a right join b on a.k = b.k "
    "right join c on b.c = c.c and b.w > 0",
    "full": "select a.k, b.k as bk, a.v, b.w from a full join b on a.k = b.k",
    "full_residual": "select a.v, b.w from a full join b on a.k = b.k and a.v > 0 and b.w > 0 "
    "and a.v < b.w",
    "full_where": "select a.v, b.w from a full join b on a.k = b.k where a.k is null or b.k is "
    "null",
}

_NESTED: Final = {
    "project": "select k as key, v + 1 as v1 from a where v > 0 or g is null",
    "star": "select * from a where k = v",
    "star_of": "select b.*, a.g from a join b on a.k = b.k",
    "derived": "select q.twice from (select k, v * 2 as twice from a where v > 0) q where q.k < 2",
    "alias_is_not_column": "select v as k, k as v from a where k = 1",
    "lateral_alias_is_column": "select g as k1, k as g from a",
    "cte": "with q as (select k, v from a where v > 0) select x.k, y.v from q x join q y on "
    "x.k = y.k",
    "cte_shadows": "with b as (select k, v as w from a) select w from b",
    "cte_of_cte": "with q as (select k, w from b), r(z) as (select k from q where w > 0) "
    "select z, w from r join q on z = k",
    "distinct": "select distinct g, v from a",
    "distinct_expression": "select distinct v % 2 as parity from a where v is not null",
    "distinct_below": "select q.g, b.w from (select distinct k, g from a) q join b on q.k = b.k",
    "union_all": "select k from a union all select c from b",
    "union": "select k, g from a union select c, name from c",
    "union_chain": "select k from a union select c from b union all select c from c",
    "union_widened": "select k, g from a union all select w, 'z' from b",
    "union_below": "select q.x, count(*) as n from (select k as x from a union all select c from b "
    "union all select c from c) q group by q.x",
    "union_pruned": "select x from (select k as x, v as y from a union all select k, c from b) q",
    "union_of_groups": "select g, count(*) as n from a group by g union all select name, c from c",
    "union_counted": "select count(*) as n from (select k from a union all select k from b) q",
    "or_of_ands": "select a.v, b.w from a, b where (a.k = b.k and a.v = 1 and b.w > 0) "
    "or (b.k = a.k and a.v = 0 and b.w < 1)",
    "or_with_common": "select k from a where (v = 1 and g = 'x') or v = 1",
    "order_is_nothing": "select k, v from (select k, v from a order by v) q order by k desc",
}

_GROUPS: Final = {
    "group": "select g, count(*) as n, sum(v) as s, avg(v) as m, count(v) as c from a group by g",
    "group_min_max": "select g, min(v) as lo, max(v) as hi, max(v) - min(v) as span from a "
    "group by g",
    "group_distinct": "select g, count(distinct v) as n, sum(distinct v) as s, "
    "avg(distinct k) as m from a group by g",
    "group_filter": "select g, count(*) filter (where v > 0) as p, count_if(v > 0) as q, "
    "sum(v) filter (where k > 0) as s from a group by g",
    "group_having": "select g, sum(v) as s from a group by g having count(*) > 1 and sum(v) > 0",
    "group_having_alias": "select g, sum(v) as total from a group by g having total > 0",
    "group_expression": "select k % 2 as parity, sum(v) + count(*) as s from a "
    "where k is not null group by k % 2",
    "group_alias": "select upper(g) as u, count(*) as n from a group by u",
    "group_position": "select g, k + 1 as k1, count(*) as n from a group by 1, 2",
    "group_constant": "select 5 as five, count(*) as n from a group by five",
    "group_only": "select g from a group by g",
    "total": "select count(*) as n, sum(w) as s, avg(w) as m from b",
    "total_having": "select sum(v) as s from a having count(*) > 2",
    "total_of_filtered": "select count(*) as n from a where v > 0",
    "group_of_left": "select a.g, count(*) as n, count(b.w) as c from a left join b on a.k = b.k "
    "group by a.g",
    "group_of_group": "select n, count(*) as m from (select g, count(*) as n from a group by g) q "
    "group by n",
    "group_below_join": "select a.k, q.s from a join (select k, sum(w) as s from b group by k) q "
    "on a.k = q.k where q.s > a.v",
    "group_below_left": "select a.k, q.n, q.n + 1 as n1 from a left join "
    "(select k, count(*) as n, sum(w) as s from b group by k having sum(w) > 0) q on a.k = q.k",
    "total_below_join": "select a.k, q.n from a cross join (select count(*) as n from b) q",
    "group_of_distinct": "select g, count(*) as n from (select distinct g, v from a) q group by g",
    "group_of_union": "select k, sum(x) as s from (select k, v as x from a union all "
    "select k, w from b) q group by k",
    "distinct_of_group": "select distinct count(*) as n from a group by g",
    "join_of_groups": "select p.k, p.n, q.n as m from "
    "(select k, count(*) as n from a group by k) p "
    "full join (select k, count(*) as n from b group by k) q on p.k = q.k",
    "count_of_groups": "select count(*) as n from (select k from a group by k) p, "
    "(select distinct c from b) q",
    "expression_of_calls": "select g, case when count(v) = 0 then null else sum(v) * 1.5 end as r "
    "from a group by g",
    "filter_below_group": "select q.p, q.n from (select k + 1 as p, count(*) as n from a "
    "group by 1) q where q.p > 0 and q.n > 1",
    "filter_below_distinct": "select q.g from (select distinct g, v from a) q where q.v > 0",
    "filter_of_total": "select q.n from (select count(*) as n from a) q where q.n > 3 and 1 = 1",
    "count_both": "select g, count(case when k is not null then v end) as n from a group by g",
}

_SUBQUERIES: Final = {
    "exists": "select k, v from a where exists (select 1 from b where b.k = a.k)",
    "exists_residual": "select k, v from a where v > 0 and exists "
    "(select * from b where b.k = a.k and b.w > a.v and b.c > 0)",
    "exists_left_only": "select k from a where exists (select 1 from b where a.v > 0 and b.k = "
    "a.k)",
    "exists_theta": "select k from a where exists (select 1 from b where b.w > a.v)",
    "exists_uncorrelated": "select k from a where exists (select 1 from b where w > 1)",
    "exists_total": "select k from a where exists (select count(*) from b)",
    "not_exists": "select k, v from a where not exists (select 1 from b where b.k = a.k)",
    "not_exists_left_only": "select k from a where not exists "
    "(select 1 from b where a.v > 0 and b.k = a.k)",
    "exists_join": "select a.k, b.w from a join b on a.k = b.k where exists "
    "(select 1 from c where c.c = b.c and c.name = a.g)",
    "exists_twice": "select k from a where exists (select 1 from b where b.k = a.k) "
    "and not exists (select 1 from c where c.c = a.v)",
    "exists_nested": "select k from a where exists (select 1 from b where b.k = a.k and exists "
    "(select 1 from c where c.c = b.c))",
    "exists_same_table": "select v from a where exists (select 1 from a x where x.k = a.k "
    "and x.v > a.v)",
    "exists_of_join": "select k from a where exists (select 1 from b join c on b.c = c.c "
    "where b.k = a.k and c.name <> a.g)",
    "in": "select k, v from a where k in (select c from b)",
    "in_expression": "select k from a where k + 1 in (select c * 2 from b where w > 0)",
    "in_correlated": "select k from a where k in (select c from b where b.w > a.v)",
    "in_group": "select k from a where k in (select c from b group by c having sum(w) > 1)",
    "in_distinct": "select k from a where k in (select distinct c from b)",
    "in_union": "select k from a where k in (select c from b union select c from c)",
    "in_pair": "select k from a where (k, v) in (select k, c from b)",
    "not_in": "select id from d where id not in (select x from d where x > 0)",
    "in_of_derived": "select q.n from (select k, count(*) as n from a group by k) q "
    "where q.k in (select k from b) and q.n > 1",
    "exists_below_left": "select q.k, b.w from (select k from a where exists "
    "(select 1 from c where c.c = a.v)) q left join b on q.k = b.k",
    "group_of_exists": "select g, count(*) as n from a where exists (select 1 from b "
    "where b.k = a.k) group by g",
}

PORTABLE: Final = {**_JOINS, **_NESTED, **_GROUPS, **_SUBQUERIES}

SPARK_ONLY: Final = {
    "renamed": "select q.x + q.y as s from (select k, v from a) as q(x, y)",
    "parenthesised": "select a.k, b.w, c.name from a left join (b join c on b.c = c.c) on a.k = "
    "b.k",
    "natural": "select c, name, w from b natural join c",
    "left_semi": "select a.k, v from a left semi join b on a.k = b.k and b.w > a.v and a.v > 0",
    "left_anti": "select a.k, v from a left anti join b on a.k = b.k and b.w > a.v and a.v > 0",
    "semi_using": "select k, v from a semi join b using (k)",
    "semi_in_chain": "select a.k, c.name from a left semi join b on a.k = b.k join c on a.v = c.c",
    "natural_star": "select * from b natural join c",
    "natural_full_star": "select * from b natural full join c",
    "using_star": "select * from a left join b using (k)",
    "using_right_star": "select * from a right join b using (k)",
    "except_star": "select * except (v) from a",
    "qualified_star_of_using": "select b.*, g from a full join b using (k)",
    "lateral_alias": "select k + 1 as x, x * 2 as y from a",
    "lateral_alias_of_call": "select g, sum(v) as s, s + 1 as s1 from a group by g",
    "count_pair": "select g, count(distinct k, v) as n, count(k, v) as m from a group by g",
    "spread": "select g, stddev(v) as a1, std(k) as a2, stddev_samp(v) as a3, stddev_pop(v) as a4, "
    "variance(v) as a5, var_samp(k) as a6, var_pop(v) as a7 from a group by g",
    "booleans": "select g, bool_and(v > 0) as a1, every(k > 0) as a2, bool_or(v > 0) as a3, "
    "any(k > 0) as a4, some(v > 1) as a5, mean(v) as a6 from a group by g",
    "distinct_kept": "select g, min(distinct v) as a1, max(distinct v) as a2, "
    "bool_or(distinct v > 0) as a3 from a group by g",
    "group_all": "select g, k % 2 as p, count(*) as n from a group by all",
    "global_all": "select count(*) as n from a group by all",
    "filter_distinct": "select g, count(distinct v) filter (where k > 0) as n from a group by g",
    "union_types": "select k as x, 1.5 as y from a union all select w, 2 from b "
    "union all select id, cast(x as double) from d",
    "union_null": "select null as x, k from a union select g, v from a",
    "decimals": "select cast(k as decimal(10,2)) as m, sum(cast(v as decimal(12,2)) * "
    "(1 - cast(k as decimal(12,2)))) as s from a group by 1",
    "dates": "select g, max(date '2020-01-01' + v) as m from a group by g",
    "unknown_function": "select hypot(k, v) as h, count(*) as n from a group by hypot(k, v)",
    "not_in_null_safe": "select id from d where id not in (select id from d where t = 'x')",
    "struct_field": "select s.x as p, q.s.y as q, count(*) as n from e q where q.s.x > 0 "
    "group by 1, 2",
    "case_of_names": "select A.K as Key, count(*) as N from A group by a.k having N > 1",
    "full_right_mix": "select coalesce(a.k, b.k) as k, name from a full join b on a.k = b.k "
    "right join c on c.c = b.c",
}

UNSUPPORTED: Final = {
    "select k from a limit 3": "LIMIT",
    "select q.k from (select k from a order by v limit 3) q": "LIMIT or OFFSET in the derived",
    "select k from a except select k from b": "EXCEPT",
    "select k from a intersect select k from b": "INTERSECT",
    "select row_number() over (order by k) as r from a": "window",
    "select k, sum(v) over (partition by g) as s from a": "window",
    "select k from a where v > (select max(w) from b)": "subquery",
    "select k, (select max(w) from b) as m from a": "subquery",
    "select k from a where v > 0 or exists (select 1 from b where b.k = a.k)": "subquery",
    "select k from a where v > 0 or k in (select k from b)": "subquery",
    "select k from a where k not in (select k from b)": "NOT IN",
    "select id from d where id not in (select k from b)": "NOT IN",
    "select k from a where g in (select k from b)": "IN between",
    "select k from a where exists (select 1 from b where b.k = a.k limit 1)": "LIMIT",
    "select k from a where k in (select max(b.c) from b where b.k = a.k)": "correlated",
    "select k from a where exists (select 1 from b where b.k = a.k and exists "
    "(select 1 from c where c.c = a.v))": "correlated",
    "select g, k, count(*) as n from a group by rollup (g, k)": "ROLLUP",
    "select g, k, count(*) as n from a group by cube (g, k)": "CUBE",
    "select g, k, count(*) as n from a group by grouping sets ((g), (k))": "GROUPING SETS",
    "select g, count(*) as n from a group by g with rollup": "ROLLUP",
    "select g, collect_list(v) as l from a group by g": "COLLECT_LIST",
    "select g, first(v) as f from a group by g": "FIRST",
    "select g, percentile(v, 0.5) as p from a group by g": "PERCENTILE",
    "select g, stddev(distinct v) as s from a group by g": "DISTINCT",
    "select v + 1 as v, count(*) as n from a group by k, v having v > 1": "both a column",
    "select a.k from a, b right join c on b.c = c.c": "a product before a RIGHT JOIN",
    "select x from a lateral view explode(array(k, v)) t as x": "LATERAL VIEW",
    "select count(*) as n from (values (1), (2)) q, a": "VALUES",
    "with recursive r(n) as (select k from a union all select n + 1 from r where n < 3) "
    "select n from r": "RECURSIVE",
}
