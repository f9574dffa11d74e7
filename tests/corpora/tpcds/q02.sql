-- Weekly sales by day of the week, compared with the following year.
with sold as (
  select ws_sold_date_sk as sold_date_sk, ws_ext_sales_price as price from web_sales
  union all
  select cs_sold_date_sk, cs_ext_sales_price from catalog_sales
),
weekly as (
  select
    d_week_seq,
    sum(case when d_day_name = 'Sunday' then price end) as sun,
    sum(case when d_day_name = 'Monday' then price end) as mon,
    sum(case when d_day_name = 'Tuesday' then price end) as tue,
    sum(case when d_day_name = 'Wednesday' then price end) as wed,
    sum(case when d_day_name = 'Thursday' then price end) as thu,
    sum(case when d_day_name = 'Friday' then price end) as fri,
    sum(case when d_day_name = 'Saturday' then price end) as sat
  from sold
  join date_dim on d_date_sk = sold_date_sk
  group by d_week_seq
),
this_year as (
  select weekly.* from weekly join date_dim using (d_week_seq) where d_year = 2001
),
next_year as (
  select weekly.* from weekly join date_dim using (d_week_seq) where d_year = 2001 + 1
)
select
  a.d_week_seq,
  round(a.sun / b.sun, 2) as sun_ratio,
  round(a.mon / b.mon, 2) as mon_ratio,
  round(a.tue / b.tue, 2) as tue_ratio,
  round(a.wed / b.wed, 2) as wed_ratio,
  round(a.thu / b.thu, 2) as thu_ratio,
  round(a.fri / b.fri, 2) as fri_ratio,
  round(a.sat / b.sat, 2) as sat_ratio
from this_year as a
join next_year as b on a.d_week_seq = b.d_week_seq - 53
order by a.d_week_seq
